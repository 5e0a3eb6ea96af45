"""Who may tell what others have asked (CVE-2025-46570): `--cache-isolation key`.

A computed prompt shows in `cached_tokens`, and in how soon the first token comes. The second is a
matter of milliseconds, which nobody can measure on a machine that others use; but there is no other
way to be sooner than to have the prompt in the cache, and the first tells that.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.asking import CHAT, COMPLETIONS, Json, chat_body, completion_body
from tests.server_process import SOON_S, ServerProcess, serving_model

ONE, OTHER, ADMIN = "sk-one", "sk-other", "sk-admin"
PROMPT = "a prompt that is long enough for several pages of the cache " * 3


@pytest.fixture(scope="module")
def isolating(
    case_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("keys")
    for name, keys in (("api", f"{ONE}\n{OTHER}\n"), ("admin", ADMIN)):
        (folder / name).write_text(keys)
        (folder / name).chmod(0o600)
    flags = "--page-size 16 --max-running 4 --max-kv-tokens 16384 --cache-isolation key"
    keys = ["--api-key-file", str(folder / "api"), "--admin-key-file", str(folder / "admin")]
    with serving_model(case_folder, *flags.split(), *keys) as server:
        yield server.ready()
        server.end_clean()


def ask(server: ServerProcess, path: str, body: Json, **headers: str) -> Json:
    response = httpx.post(
        f"{server.url}{path}", json=body, headers=headers, timeout=SOON_S, verify=False
    )
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def completions_cached(server: ServerProcess, key: str, **more: Any) -> int:
    usage = ask(server, COMPLETIONS, completion_body(PROMPT, **more), **bearer(key))["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_key_finds_its_own_prompts_and_no_others(isolating: ServerProcess) -> None:
    assert completions_cached(isolating, ONE) == 0
    own = completions_cached(isolating, ONE)
    assert own >= 128
    assert completions_cached(isolating, OTHER) == 0
    assert completions_cached(isolating, ADMIN) == 0
    assert [completions_cached(isolating, key) for key in (ONE, OTHER, ADMIN)] == [own] * 3


def test_a_salt_divides_further_and_names_nobody_else(isolating: ServerProcess) -> None:
    """Neither does the text of another key, nor its digest, lead into its namespace."""
    assert completions_cached(isolating, ONE, cache_salt="mine") == 0
    assert completions_cached(isolating, ONE, cache_salt="mine") > 0
    assert completions_cached(isolating, OTHER, cache_salt="mine") == 0
    assert completions_cached(isolating, OTHER, cache_salt=ONE) == 0


def test_a_second_key_in_another_header_changes_nothing(isolating: ServerProcess) -> None:
    body = completion_body("another prompt, as long as that " * 5)
    ask(isolating, COMPLETIONS, body, **bearer(ONE))
    spied = ask(isolating, COMPLETIONS, body, **bearer("wrong"), **{"x-api-key": OTHER})
    assert spied["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_every_api_is_divided(isolating: ServerProcess) -> None:
    asked: list[tuple[str, Json, tuple[str, ...]]] = [
        (CHAT, chat_body(f"chat {PROMPT}"), ("prompt_tokens_details", "cached_tokens")),
        ("/v1/responses", {"model": "tiny", "input": f"answer {PROMPT}", "max_output_tokens": 2},
         ("input_tokens_details", "cached_tokens")),
        ("/v1/messages", {"model": "tiny", "max_tokens": 2,
                          "messages": [{"role": "user", "content": f"say {PROMPT}"}]},
         ("cache_read_input_tokens",)),
    ]  # fmt: skip

    def cached(path: str, body: Json, names: tuple[str, ...], key: str) -> int:
        told: Any = ask(isolating, path, body, **bearer(key))["usage"]
        for name in names:
            told = told[name]
        assert isinstance(told, int)
        return told

    for one in asked:
        assert cached(*one, ONE) == 0
        assert cached(*one, ONE) >= 128
        assert cached(*one, OTHER) == 0
