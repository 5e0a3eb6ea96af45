"""Processes and threads. `python -m runtime.serve` starts a server."""

import sys
from pathlib import Path

# http/ and kernels/ are source roots, not packages: those names belong to the
# standard library and to Hugging Face. An install maps the package inside each;
# a bare checkout finds it here. Each root holds that one package and nothing else,
# so going first on the path shadows nothing.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    sys.path[:0] = [str(_root / "http"), str(_root / "kernels")]
