"""apt-get with lists and archives of its own: needs no root, leaves the machine as it is."""

from collections.abc import Sequence
from pathlib import Path

from runtime.setup.children import Workshop


class Apt:
    """One private state of apt. Owned by the main thread.

    sources: lines for a sources.list to use alone; None uses the machine's own sources.
    """

    def __init__(self, shop: Workshop, folder: Path, *, sources: str | None) -> None:
        self._shop = shop
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._options = [
            f"-oDir::State::Lists={folder / 'lists'}",
            f"-oDir::Cache={folder / 'cache'}",
            # apt would hand downloads to the user _apt, who may not read this folder.
            "-oAPT::Sandbox::User=root",
        ]
        if sources is not None:
            path = folder / "sources.list"
            path.write_text(sources)
            self._options += [
                f"-oDir::Etc::sourcelist={path}",
                "-oDir::Etc::sourceparts=/dev/null",
            ]

    def update(self, title: str) -> None:
        self._shop.run(title, ["apt-get", *self._options, "update"], log="apt")

    def run(self, title: str, words: Sequence[str], *, cwd: Path) -> None:
        """Runs `apt-get WORDS`, leaving downloads in `cwd`. Raises children.Failed."""
        self._shop.run(title, ["apt-get", *self._options, *words], log="apt", cwd=cwd)
