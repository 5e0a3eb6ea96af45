"""Makes sure that threads run side by side, where this Python can do that at all.

Some extension modules turn the GIL back on when they are imported, unless PYTHON_GIL=0 says that
they must not. The variable is read when the interpreter starts; hence a second start where it is
missing.
"""

import os
import sys
import sysconfig
from collections.abc import Mapping


def is_free_threaded_build() -> bool:
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def is_gil_enabled() -> bool:
    check = getattr(sys, "_is_gil_enabled", None)
    return True if check is None else bool(check())


def restart_without_gil(environ: Mapping[str, str] = os.environ) -> None:
    """Starts this process anew with the GIL off for good. Returns where that is not needed.

    Call it before other threads or files exist: nothing of this process is kept but its id.
    """
    if not is_free_threaded_build() or sys.flags.gil == 0:
        return
    if environ.get("PYTHON_GIL") == "0":
        return  # set, and yet not obeyed (python -E): once more would change nothing
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**environ, "PYTHON_GIL": "0"})


def check_gil() -> str | None:
    """A warning for an ordinary build, None where the GIL is off. Call it after all imports.

    Raises RuntimeError where a free-threaded build runs with the GIL on.
    """
    if not is_gil_enabled():
        return None
    if is_free_threaded_build():
        raise RuntimeError("something turned the GIL on; start with PYTHON_GIL=0 to forbid that")
    return (
        f"this Python {sys.version.split()[0]} has a GIL: all threads share one core. That works, "
        "but slower; Plait is made for a free-threaded build (3.13t, 3.14t)"
    )
