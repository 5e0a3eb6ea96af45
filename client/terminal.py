"""What may be shown in a terminal of what others wrote: models and servers."""

from typing import Final

# They may not move the cursor, rename the window or colour what is not their own: of the control
# characters, C0 and C1 both, line ends and tabs alone are shown.
_CONTROLS: Final = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def printable(text: str) -> str:
    """`text` without what would control a terminal."""
    return text.translate(_CONTROLS)
