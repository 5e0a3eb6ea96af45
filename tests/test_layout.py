"""Layout rules that no other tool would notice being broken."""

import ast
import http
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "gpu_ops": ROOT / "kernels" / "gpu_ops",
    "engine": ROOT / "engine",
    "httpd": ROOT / "http" / "httpd",
    "runtime": ROOT / "runtime",
    "client": ROOT / "client",
}
# Who may import whom. A dotted name allows that one module only.
MAY_IMPORT = {
    "gpu_ops": set(),
    "engine": {"gpu_ops"},
    "httpd": {
        "engine.request",
        "engine.sampling_limits",
        "engine.grammar.spec",
        "engine.until_marker",
    },
    "runtime": {"engine", "httpd", "client"},
    "client": set(),
}
# The engine's device half. All other modules of the engine are its host half, which decides
# everything and never loads torch.
MAY_LOAD_TORCH = (
    "attention", "build", "cpu_executor", "cuda_executor", "cuda_memory", "destination",
    "flashinfer_prefill", "forward", "graphs", "host_pages", "kv_cache", "load", "models",
    "offline", "pager", "rank_group", "redraw", "room", "rope_table", "scoring", "small_steps",
    "special_rows", "staging", "streams", "weights",
)  # fmt: skip


def imported_names(file: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every absolute import in a file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_http_is_the_standard_library() -> None:
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    assert Path(http.__file__).resolve().is_relative_to(stdlib)


@pytest.mark.parametrize("folder", ["http", "kernels", "tests/http", "tests/kernels"])
def test_borrowed_names_are_not_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    wrong = []
    for file in sorted(PACKAGES[package].rglob("*.py")):
        for line, target in imported_names(file):
            top = target.split(".")[0]
            allowed = any(f"{target}.".startswith(f"{ok}.") for ok in MAY_IMPORT[package])
            if top in PACKAGES and top != package and not allowed:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def engine_modules() -> dict[str, Path]:
    """Every module of the engine, by its dotted name."""
    files = sorted(PACKAGES["engine"].rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


def in_device_half(target: str, names: Iterable[str] = MAY_LOAD_TORCH) -> bool:
    return any(f"{target}.".startswith(f"engine.{name}.") for name in names)


def test_the_host_half_does_not_load_torch() -> None:
    modules = [name.removesuffix(".__init__") for name in engine_modules()]
    host_half = ", ".join(name for name in modules if not in_device_half(name))
    program = f"import {host_half}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", MAY_LOAD_TORCH)
def test_the_device_half_has_no_module_that_could_do_without_torch(name: str) -> None:
    modules = engine_modules().items()
    files = [file for module, file in modules if in_device_half(module, [name])]
    targets = [target for file in files for _, target in imported_names(file)]
    assert any(target.split(".")[0] == "torch" or in_device_half(target) for target in targets)


def test_nothing_unpickles() -> None:
    """No code from data: neither requests nor checkpoints may run anything.

    CVE-2024-9052, CVE-2024-9053, CVE-2024-11041, CVE-2025-29783, CVE-2025-30165, CVE-2025-30202,
    CVE-2025-32444, CVE-2025-47277; CVE-2026-3059, CVE-2026-3060, CVE-2026-3989, CVE-2026-7301,
    CVE-2026-14890, CVE-2026-93034, CVE-2026-93088: what is nowhere imported cannot be reached.
    """
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {target}"
        for package in PACKAGES.values()
        for file in package.rglob("*.py")
        for line, target in imported_names(file)
        if target.split(".")[0] in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
        or target == "torch.load"
    ]
    assert not wrong, "\n".join(wrong)
