"""Offline generation on a small model with random weights."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine
from engine.offline import LLM, Output
from engine.request import (
    ChatPrompt,
    ReasoningMarkers,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from tests.fakes_tokenizers import write_checkpoint

GREEDY = SamplingParams(max_new_tokens=8, temperature=0)
CHAT = [{"role": "user", "content": "the cat"}]
CONTEXT = 64


def checkpoint(folder: Path) -> Path:
    write_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> LLM:
    return LLM(
        folder,
        progress=False,
        load_format="dummy",
        device="cpu",
        page_size=4,
        max_running=4,
        max_model_len=CONTEXT,
        max_kv_tokens=256,
        cpu_threads=1,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert not shared.engine.has_work
    shared.engine.check_integrity()


def one(llm: LLM, prompt: Any, params: SamplingParams | None = GREEDY) -> Output:
    (output,) = llm.generate(prompt, params, progress=False)
    return output


def test_outputs_are_in_the_prompts_order(llm: LLM) -> None:
    """More prompts than rows, of all kinds and lengths: each as it is alone."""
    prompts: list[Any] = ["the cat", CHAT, [5, 6, 7], "a dog on the mat, and more", "x", [9] * 30]
    params = [replace(GREEDY, max_new_tokens=count) for count in (9, 1, 5, 2, 7, 3)]
    together = llm.generate(prompts, params, progress=False)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        alone = one(llm, prompt, each)
        assert replace(output, cached_tokens=0) == replace(alone, cached_tokens=0)
        assert len(output.token_ids) == each.max_new_tokens
        assert (output.finish_reason, output.error) == ("length", None)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("the cat", TextPrompt("the cat")),
        (CHAT, ChatPrompt(tuple(CHAT))),
        ([5, 6, 7], TokenPrompt((5, 6, 7))),
    ],
)
def test_a_single_prompt_of_each_kind(llm: LLM, short: Any, full: Any) -> None:
    assert one(llm, short).token_ids == one(llm, [short]).token_ids == one(llm, full).token_ids


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], GREEDY, progress=False) == []


def test_what_an_output_says(llm: LLM) -> None:
    prompt = list(range(20, 40))
    one(llm, prompt)
    output = one(llm, prompt)
    assert output.prompt_tokens == 20
    assert output.cached_tokens == 16  # whole pages before the last token
    assert len(output.token_ids) == 8


def test_stop_strings_and_stop_ids(llm: LLM) -> None:
    free = one(llm, "the cat", replace(GREEDY, max_new_tokens=30))
    stop = free.text[len(free.text) // 2 :][:3]
    cut = one(llm, "the cat", replace(GREEDY, max_new_tokens=30, stop=(stop,)))
    assert (cut.finish_reason, cut.stop_match) == ("stop", stop)
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    stop_id = free.token_ids[4]
    cut = one(llm, "the cat", replace(GREEDY, stop_token_ids=(stop_id,)))
    assert (cut.finish_reason, cut.stop_match) == ("stop", stop_id)
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]


def test_reasoning_is_apart(llm: LLM) -> None:
    """What this model writes, taken for reasoning that ends where a part of it stands."""
    params = replace(GREEDY, max_new_tokens=30)
    free = one(llm, "the cat", params)
    middle = len(free.text) // 2
    marker = free.text[middle : middle + 3]
    assert marker == marker.strip() and free.reasoning == ""
    markers = ReasoningMarkers("<think>", marker, always=True)
    output = one(llm, "the cat", replace(params, reasoning=markers))
    reasoning, _, content = free.text.partition(marker)
    assert (output.reasoning, output.text) == (reasoning.strip(), content.lstrip("\r\n"))
    assert output.token_ids == free.token_ids


def test_seeds(llm: LLM) -> None:
    def ids(seed: int | None) -> tuple[int, ...]:
        return one(llm, "the cat", SamplingParams(max_new_tokens=20, seed=seed)).token_ids

    assert ids(7) == ids(7)
    assert ids(-7) == ids(-7)
    assert len({ids(7), ids(8), ids(None), ids(None)}) == 4


def test_a_failing_prompt_does_not_fail_the_others(llm: LLM) -> None:
    prompts: list[Any] = ["the cat", [], [10**6], [3] * CONTEXT, [3] * (CONTEXT - 8), "the cat"]
    good, empty, unknown, too_long, fits, same = llm.generate(prompts, GREEDY, progress=False)
    assert good.token_ids == same.token_ids
    assert fits.finish_reason == "length"
    for output, told in ((empty, "empty"), (unknown, "1000000"), (too_long, str(CONTEXT))):
        assert (output.finish_reason, output.token_ids) == ("error", ())
        assert output.error is not None and told in output.error


def test_without_params_the_context_is_the_limit(llm: LLM) -> None:
    output = one(llm, [3] * (CONTEXT - 5), None)
    assert output.finish_reason == "stop" or len(output.token_ids) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", -0.1),
        ("min_p", math.inf),
        ("stop", ("",)),
        ("stop_token_ids", (10**6,)),
        ("reasoning", ReasoningMarkers("<think>", "")),
    ],
)
def test_wrong_parameters_are_refused_by_name(llm: LLM, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        llm.generate(["x", "y"], [GREEDY, replace(GREEDY, **{field: value})], progress=False)


@pytest.mark.parametrize("limit", [{"temperature": 1e-9}, {"temperature": 1.0, "top_p": 0.0}])
def test_tiny_numbers_mean_the_likeliest_token(llm: LLM, limit: dict[str, float]) -> None:
    """As over HTTP."""
    assert one(llm, "x", replace(GREEDY, **limit)).token_ids == one(llm, "x", GREEDY).token_ids


def test_wrong_arguments_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 params for 1"):
        llm.generate("x", [GREEDY, GREEDY], progress=False)
    for prompts in (7, [7.5], [None], [["a", "b"]], [["a", 1]]):
        with pytest.raises(TypeError):
            llm.generate(prompts, GREEDY, progress=False)  # type: ignore[arg-type]


def test_the_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["x", "y"], GREEDY)
    shown = capsys.readouterr()
    assert "2/2" in shown.err and not shown.out
    llm.generate(["x", "y"], GREEDY, progress=False)
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_closes_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(engine: Engine) -> None:
        raise KeyboardInterrupt

    llm = load(folder)
    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", GREEDY, progress=False)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="interrupted"):
        llm.generate("x", GREEDY, progress=False)
    llm.close()


def test_a_bare_checkout_finds_the_kernels() -> None:
    """Offline use imports no runtime, whose import would put kernels/ on the path."""
    root = Path(__file__).resolve().parents[2]
    program = (
        "import engine, sys; from importlib.util import find_spec; "
        "sys.exit(find_spec('gpu_ops') is None or 'runtime' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
