"""One real server for all cases: a random byte-level model, so that any text can be asked for.

It is served as if it wrote calls and reasoning as Qwen3 does.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.cases.asking import CONTEXT
from tests.checkpoints import CHAT_TEMPLATE, build_checkpoint, save_tokenizer
from tests.server_process import ServerProcess, serving_model

# Few rows and short chunks; calls and reasoning as Qwen3 writes them.
FLAGS = (
    *"--page-size 16 --max-running 8 --max-kv-tokens 16384 --prefill-budget 64".split(),
    *"--tool-call-parser hermes --reasoning-parser qwen3".split(),
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.fixture(scope="session")
def case_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is called "tiny"."""
    folder = tmp_path_factory.mktemp("cases") / "tiny"
    build_checkpoint(folder, max_position_embeddings=CONTEXT)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TOOLS + CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def backend(case_folder: Path) -> Tokenizer:
    """The model's own."""
    return Tokenizer.from_file(str(case_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def server(case_folder: Path) -> Iterator[ServerProcess]:
    """It must outlive every case without a word of complaint."""
    with serving_model(case_folder, *FLAGS) as server:
        yield server.ready()
        server.wait_at_rest()
        server.end_clean()
