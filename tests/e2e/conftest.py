"""Servers that many tests share: a small random model, and the real one that comes with Plait."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.setup.model import default_folder
from tests.checkpoints import CHAT_TEMPLATE, build_checkpoint, save_tokenizer
from tests.server_process import ServerProcess, serving_model

LIMIT = 4096  # context of the small model, whose prefill takes about a second
BODY_LIMIT = 1 << 17
FUSSY_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('this model takes no system message') }}{% endif %}" + CHAT_TEMPLATE
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model of random weights that is called "tiny"."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    build_checkpoint(folder, max_position_embeddings=LIMIT)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(FUSSY_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tiny(checkpoint: Path) -> Iterator[ServerProcess]:
    """Few rows, so that requests can be made to wait, and short chunks, so that prefill lasts."""
    flags = "--page-size 16 --max-running 8 --max-kv-tokens 65536 --prefill-budget 32"
    body_limit = ["--max-body-bytes", str(BODY_LIMIT)]
    with serving_model(checkpoint, *flags.split(), *body_limit) as server:
        yield server.ready()
        assert server.process.poll() is None, server.all_said()


@pytest.fixture(scope="session")
def smollm() -> Iterator[ServerProcess]:
    """SmolLM2-135M-Instruct in float32."""
    folder = default_folder()
    if not folder.is_dir():
        pytest.skip(f"{folder} is not prepared: ./plait test does that")
    with serving_model(folder, "--max-kv-tokens", "16384") as server:
        yield server.ready()
        assert server.process.poll() is None, server.all_said()
