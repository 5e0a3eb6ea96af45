"""What must not be in the source, and which versions must be below it: lessons of other engines."""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from runtime.setup.packages import read_lock
from tests.test_layout import PACKAGES, ROOT, imported_names

# The first version without the fault that a client could reach.
LEAST = {
    # CVE-2025-54121, CVE-2025-62727, CVE-2026-48710, CVE-2026-54282, CVE-2026-54283
    "starlette": (1, 3, 1),
    "h2": (4, 3, 0),  # CVE-2025-57804
    "h11": (0, 16, 0),  # CVE-2025-43859
    "jinja2": (3, 1, 6),  # CVE-2025-27516
}
RUNS_CODE = {"eval", "exec", "__import__"}
# Import of these, whole or in part, is how data became code or files became answers elsewhere.
NOT_IMPORTED = (
    "starlette.staticfiles", "starlette.responses.FileResponse", "starlette.endpoints",
    "jinja2.Environment", "jinja2.Template", "zmq", "yaml", "requests", "urllib.request",
)  # fmt: skip
IMPORTED = {"urllib.request.getproxies", "urllib.request.proxy_bypass"}  # which ask nobody


def source() -> Iterator[tuple[Path, ast.Module]]:
    """Every module of the server; setting it up is another matter."""
    for package in PACKAGES.values():
        for file in sorted(package.rglob("*.py")):
            if "setup" not in file.relative_to(package).parts:
                yield file, ast.parse(file.read_text())


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """(place, call, name of what is called)."""
    for file, tree in source():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield f"{file}:{node.lineno}", node, ast.unparse(node.func)


def test_nothing_is_evaluated() -> None:
    """CVE-2025-9141: what a model says is an attacker's input."""
    assert not [place for place, _, name in calls() if name in RUNS_CODE]


def test_weights_are_no_pickles_and_checkpoints_no_programs() -> None:
    """CVE-2025-24357, CVE-2025-32434, CVE-2025-66448, CVE-2026-22807, CVE-2026-27893,
    CVE-2026-47155, CVE-2026-55514, CVE-2026-56340.
    """
    wrong = [place for place, _, name in calls() if name in {"torch.load", "numpy.load", "np.load"}]
    wrong += [
        place
        for place, call, _ in calls()
        for keyword in call.keywords
        if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
    ]
    assert not wrong


def test_nothing_is_imported_that_opens_a_door() -> None:
    wrong = [
        f"{file}:{line} imports {target}"
        for file, _ in source()
        for line, target in imported_names(file)
        if target not in IMPORTED
        and any(f"{target}.".startswith(f"{name}.") for name in NOT_IMPORTED)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_route_lists_its_methods() -> None:
    """CVE-2026-48817."""
    routes = [(place, call) for place, call, name in calls() if name == "Route"]
    routes = [(place, call) for place, call in routes if "/http/" in place]
    assert len(routes) >= 5
    assert not [p for p, call in routes if "methods" not in {k.arg for k in call.keywords}]


@pytest.mark.parametrize("package", LEAST)
def test_versions(package: str) -> None:
    assert tuple(int(part) for part in version(package).split(".")[:3]) >= LEAST[package]


def test_every_package_is_pinned_by_its_hash() -> None:
    """CVE-2026-54232: whatever index offers it."""
    for lock in sorted((ROOT / "runtime" / "setup" / "locks").glob("*.txt")):
        pins = read_lock(lock.read_text())
        assert pins
        assert not [pin.name for pin in pins if "--hash=sha256:" not in pin.lines]
