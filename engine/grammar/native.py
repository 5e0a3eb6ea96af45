"""llguidance, or None: set-up goes on without it where it cannot be built for the interpreter.

Whoever imports this postpones its annotations; `vocabulary.load`, through which all else is
reached, says what is missing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance
else:
    try:
        import llguidance
    except ImportError:
        llguidance = None

__all__ = ["llguidance"]
