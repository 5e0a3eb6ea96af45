"""Offline generation on a small model with random weights."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import Engine
from engine.offline import LLM, Output
from engine.request import (
    ChatPrompt,
    ReasoningMarkers,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from engine.sampling_limits import check_params
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


def load(folder: Path, **settings: Any) -> LLM:
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
        **settings,
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
    prompts: list[Any] = ["the cat", [], [10**6], [3] * CONTEXT, [3] * (CONTEXT - 8)]
    prompts += [ChatPrompt((), continue_final=True), "the cat"]
    outputs = llm.generate(prompts, GREEDY, progress=False)
    good, empty, unknown, too_long, fits, silent, same = outputs
    assert good.token_ids == same.token_ids
    assert fits.finish_reason == "length"
    for output, told in (
        (empty, "empty"), (unknown, "1000000"), (too_long, str(CONTEXT)), (silent, "no messages")
    ):  # fmt: skip
        assert (output.finish_reason, output.token_ids) == ("error", ())
        assert output.error is not None and told in output.error


def test_without_params_the_context_is_the_limit(llm: LLM) -> None:
    output = one(llm, [3] * (CONTEXT - 5), None)
    assert output.finish_reason == "stop" or len(output.token_ids) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**31),
        ("max_new_tokens", True),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 2.0),
        ("top_p", -0.1),
        ("min_p", math.inf),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", "word"),
        ("stop_token_ids", (10**6,)),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("min_tokens", GREEDY.max_new_tokens + 1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((10**6, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((5, math.inf),)),
        ("logit_bias", (5, 1.0)),
        ("logit_bias", {5: 1.0}),
        ("allowed_token_ids", (10**9,)),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", ()),
        ("bad_words", ("",)),
        ("thinking_budget", -1),
        ("reasoning", ReasoningMarkers("<think>", "")),
        ("reasoning", ReasoningMarkers("<think>", "</think>\n")),
        ("priority", 2**31),
        ("routing_key", None),
    ],
)
def test_wrong_parameters_are_refused_by_name(llm: LLM, field: str, value: Any) -> None:
    """Before anything runs: no prompt fails, nor is the model closed."""
    with pytest.raises(ValueError, match=field):
        llm.generate(["x", "y"], [GREEDY, replace(GREEDY, **{field: value})], progress=False)


@pytest.mark.parametrize(
    ("field", "value"), [("echo", True), ("logprobs", 0), ("logprobs", 300), ("prompt_logprobs", 1)]
)
def test_what_no_output_has_is_refused(llm: LLM, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        llm.generate("x", replace(GREEDY, **{field: value}), progress=False)


@pytest.mark.parametrize("field", [each.name for each in fields(SamplingParams)])
def test_every_field_is_looked_at(field: str) -> None:
    """A new one cannot be forgotten."""
    wrong = replace(GREEDY, **{field: object()})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{field} is <object "):
        check_params(wrong, vocab_size=10)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_p", 1.5, "top_p is 1.5; it must be between 0 and 1"),
        ("logprobs", 300, "logprobs is 300; it must be between 0 and 20"),
        ("allowed_token_ids", (1, 10), "allowed_token_ids has 10; ids are .* below 10"),
        ("logit_bias", ((10, 1.0),), "logit_bias has 10; ids are .* below 10"),
        ("logit_bias", ((1, 101.0),), "logit_bias is 101.0; it must be between -100 and 100"),
        ("min_tokens", 9, "min_tokens is 9; it must be at most max_new_tokens, 8"),
    ],
)
def test_a_refusal_tells_value_and_limit(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_params(replace(GREEDY, **{field: value}), vocab_size=10)


# Of each field: what somebody means, what just fits or does not, and what has no business there.
_NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 20, 1.0, 2.0, 2**31 - 1, 2**31])
_IDS = st.integers(-2, 1000) | st.integers()
_TEXTS = st.text(max_size=3)
_ANYTHING = (
    _NUMBERS | st.none() | st.booleans() | _TEXTS
    | st.lists(_IDS | _TEXTS, max_size=3).map(tuple)
    | st.lists(st.tuples(_IDS, _NUMBERS), max_size=3).map(tuple)
    | st.builds(ReasoningMarkers, _TEXTS, _TEXTS, st.booleans())
)  # fmt: skip
_FIELDS = [each.name for each in fields(SamplingParams)]
_PLAUSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(1, 6),
        "temperature": st.floats(0, 100),
        "top_k": st.integers(0, 2**31 - 1),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.lists(st.text(min_size=1, max_size=2), max_size=2).map(tuple),
        "stop_token_ids": st.lists(st.integers(0, 99), max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 2),
        "logit_bias": st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100))).map(tuple),
        "allowed_token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=5).map(tuple),
        "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
        "thinking_budget": st.integers(0, 3),
        "reasoning": st.just(ReasoningMarkers("<think>", "</think>", always=True)),
    },
)
_WILD = st.dictionaries(st.sampled_from(_FIELDS), _ANYTHING, max_size=2)


@settings(max_examples=150, deadline=None)
@given(plausible=_PLAUSIBLE, wild=_WILD)
def test_whatever_is_asked_is_refused_or_ends(
    shared: LLM, plausible: dict[str, Any], wild: dict[str, Any]
) -> None:
    params = replace(SamplingParams(max_new_tokens=4), **(plausible | wild))
    try:
        together = shared.generate(["the cat", [5, 6, 7]], [params, GREEDY], progress=False)
    except ValueError as refused:
        assert str(refused).startswith(tuple(_FIELDS))
    else:
        assert {each.finish_reason for each in together} <= {"stop", "length", "error"}
        assert together[1].error is None
    assert not shared.engine.has_work
    shared.engine.check_integrity()


@pytest.mark.parametrize("field", ["queue_timeout_s", "running_timeout_s"])
def test_timeouts_are_a_servers(folder: Path, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is 5"):
        load(folder, **{field: 5})


@pytest.mark.parametrize("limit", [{"temperature": 1e-9}, {"temperature": 1.0, "top_p": 0.0}])
def test_tiny_numbers_mean_the_likeliest_token(llm: LLM, limit: dict[str, float]) -> None:
    """As over HTTP."""
    assert one(llm, "x", replace(GREEDY, **limit)).token_ids == one(llm, "x", GREEDY).token_ids


def test_wrong_arguments_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 params for 1"):
        llm.generate("x", [GREEDY, GREEDY], progress=False)
    with pytest.raises(TypeError, match="params"):
        llm.generate("x", [{"max_new_tokens": 8}], progress=False)  # type: ignore[list-item]
    wrong = (TextPrompt(7), TokenPrompt((7.5,)), TokenPrompt(7), ChatPrompt(("a",)))  # type: ignore[arg-type]
    for prompts in (7, [7.5], [None], [["a", "b"]], [["a", 1]], *wrong):
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
