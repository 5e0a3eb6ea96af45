"""The CUDA executor gives transformers' greedy ids, with graphs and without.

The same executor runs on a host, with plain operations in the place of kernels: what it copies,
when, and what it does with a descriptor needs no device to be tested. On a device, float32 ids must
be equal; bfloat16 goes through the decode kernel, whose logits have a tolerance (test_gpu_decode).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.cuda_executor import CudaExecutor
from engine.descriptor import StepDescriptor
from engine.graph_sizes import MOST_ROWS, buckets_up_to
from engine.load import load_model
from engine.request import Request, SamplingParams
from engine.small_steps import MOST_KEYS_READ
from gpu_ops.host_ring import CHANGE_WORDS
from gpu_ops.plain_decode import PlainSampler
from tests.checkpoints import VOCAB, build_checkpoint
from tests.engine.conftest import NEW_TOKENS, Expected, compute_expected
from tests.fakes_streams import HostStreams
from tests.step_driver import StepDriver, int32

MAX_TOKENS = 64
ROWS = 6
GPU_FAMILIES = [
    "llama", "llama-tied-biased", "mistral-window", "qwen2-window", "qwen3", "qwen3-moe",
    "qwen3-moe-mixed",
]  # fmt: skip
ON_DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [
    "host",
    "host, small steps",
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cuda graphs", marks=pytest.mark.gpu),
    pytest.param("cuda graphs, small steps", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """Family name → a checkpoint whose heads have 64 dimensions, and what is expected of it."""
    found: dict[str, Expected] = {}

    def case(family: str) -> Expected:
        if family not in found:
            folder = tmp_path_factory.mktemp(f"gpu-{family}")
            build_checkpoint(folder, family, head_dim=64)
            found[family] = compute_expected(folder)
        return found[family]

    return case


class Made:
    """An executor of a kind, and the host streams it runs on, if it does."""

    def __init__(self, folder: Path, kind: str, page_size: int, dtype: str = "float32") -> None:
        device = "cpu" if kind.startswith("host") else "cuda"
        _, model = load_model(folder, device=device, dtype=dtype)
        pages_per_row = -(-MAX_TOKENS // page_size)
        self.streams = HostStreams()
        self.executor = CudaExecutor(
            model,
            pages=1 + ROWS * pages_per_row,
            page_size=page_size,
            max_rows=ROWS,
            max_pages_per_row=pages_per_row,
            streams=self.streams if device == "cpu" else None,
            sampler=PlainSampler() if device == "cpu" else None,
            small_step_tokens=32 if "small steps" in kind else 0,
        )
        if "graphs" in kind:
            self.executor.capture_graphs(buckets_up_to(ROWS))
            self.executor.capture_small_steps()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_chunked_prompts_then_decode(
    family: str, kind: str, page_size: int, cases: Callable[[str], Expected]
) -> None:
    case = cases(family)
    driver = StepDriver(Made(case.folder, kind, page_size).executor)
    for row, (prompt, greedy) in enumerate(zip(case.prompts, case.greedy, strict=True)):
        assert driver.generate(row, prompt, NEW_TOKENS, chunk=8) == greedy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_mixed_steps(family: str, kind: str, cases: Callable[[str], Expected]) -> None:
    """Rows decode while the next prompt is prefilled in the same step, then all decode together."""
    case = cases(family)
    driver = StepDriver(Made(case.folder, kind, 16).executor)
    outputs: list[list[int]] = []
    for row, prompt in enumerate(case.prompts):
        driver.join(row)
        earlier = [*range(row)]
        half = len(prompt) // 2
        if half:
            _append(outputs, earlier, driver.step([(row, prompt[:half], False)], decode=earlier))
        first, *sampled = driver.step([(row, prompt[half:], True)], decode=earlier)
        _append(outputs, earlier, sampled)
        outputs.append([first])
    rows = [2, 0, 3, 1]
    for step in range(NEW_TOKENS):
        _append(outputs, rows, driver.step(decode=rows, same=step > 0))
    for output, greedy in zip(outputs, case.greedy, strict=True):
        assert output[:NEW_TOKENS] == greedy


def _append(outputs: list[list[int]], rows: list[int], sampled: list[int]) -> None:
    for row, token in zip(rows, sampled, strict=True):
        outputs[row].append(token)


@pytest.mark.parametrize("kind", KINDS)
def test_two_prompts_in_one_step(kind: str, cases: Callable[[str], Expected]) -> None:
    case = cases("llama")
    driver = StepDriver(Made(case.folder, kind, 16).executor)
    for row in (0, 1, 2):
        driver.join(row)
    segments = [(row, case.prompts[row], row != 1) for row in (2, 1, 0)]
    assert driver.step(segments) == [case.greedy[2][0], case.greedy[0][0]]


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_do_not_depend_on_chunks_or_mates(
    kind: str, cases: Callable[[str], Expected]
) -> None:
    case = cases("qwen3")
    prompt = case.prompts[3]
    params = SamplingParams(max_new_tokens=0, temperature=0.8, top_p=0.95, seed=-77)

    def run(mates: list[int], chunk: int) -> list[int]:
        driver = StepDriver(Made(case.folder, kind, 16).executor)
        for row in mates:
            driver.join(row, SamplingParams(max_new_tokens=0, temperature=1.0, seed=row))
            driver.step([(row, [5, 6, row], True)])
        driver.join(3, params)
        for at in range(0, len(prompt), chunk):
            out = driver.step([(3, prompt[at : at + chunk], True)])
        while len(out) < 12:
            out += driver.step(decode=[*mates, 3])[-1:]
        return out

    alone = run([], 64)
    assert len(set(alone)) > 4
    assert run([0, 5, 2], 7) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_a_thread_of_their_own(kind: str, cases: Callable[[str], Expected]) -> None:
    """A server builds its engine on one thread and steps it on another."""
    case = cases("llama")
    driver = StepDriver(Made(case.folder, kind, 16).executor)
    found: list[list[int]] = []
    thread = Thread(
        target=lambda: found.append(driver.generate(2, case.prompts[2], NEW_TOKENS, chunk=16))
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and found == [case.greedy[2]]


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_decode_step_copies_nothing(page_size: int, cases: Callable[[str], Expected]) -> None:
    """With changes or without, in either direction."""
    case = cases("llama")
    made = Made(case.folder, "host", page_size)
    driver = StepDriver(made.executor)
    for row in (0, 1):
        driver.join(row)
    driver.step([(row, case.prompts[row], True) for row in (0, 1)])
    copies = made.streams.copies_in, made.streams.copy_out.waits  # type: ignore[attr-defined]
    for step in range(9):  # more than the rings' length
        driver.step(decode=[1, 0], same=step > 2)
    assert (made.streams.copies_in, made.streams.copy_out.waits) == copies  # type: ignore[attr-defined]


@pytest.mark.parametrize("most_words", [0, 20, CHANGE_WORDS])
@pytest.mark.parametrize("kind", KINDS)
def test_changes_between_decode_steps(
    kind: str,
    most_words: int,
    cases: Callable[[str], Expected],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None, in every step, or in some: all of them staged, only those with pages, or none."""
    monkeypatch.setattr("engine.cuda_executor.CHANGE_WORDS", most_words)
    case = cases("qwen3")
    driver = StepDriver(Made(case.folder, kind, 4).executor)
    outputs: list[list[int]] = []
    for row, prompt in enumerate(case.prompts):
        driver.join(row)
        outputs.append(driver.step([(row, prompt, True)]))
    rows = list(range(len(outputs)))
    for step in range(NEW_TOKENS - 1):
        changes = step in (0, 1, 2, 5, 6, 11)
        rows = rows[1:] + rows[:1] if changes else rows
        _append(outputs, rows, driver.step(decode=rows, same=not changes))
    assert outputs == [greedy[:NEW_TOKENS] for greedy in case.greedy]


def test_a_step_larger_than_the_staging_buffers(cases: Callable[[str], Expected]) -> None:
    case = cases("llama")
    made = Made(case.folder, "host", 16)
    driver = StepDriver(made.executor)
    driver.join(0)
    slot = made.executor._staging._slots[0]
    slot.host = slot.host[:8]
    assert driver.step([(0, case.prompts[2], True)]) == [case.greedy[2][0]]


def test_a_block_that_is_no_descriptor_is_refused(cases: Callable[[str], Expected]) -> None:
    with pytest.raises(ValueError, match="not a step descriptor"):
        Made(cases("llama").folder, "host", 16).executor.launch_no_sync(int32([1, 2, 3]))


def test_long_contexts_make_no_small_step(cases: Callable[[str], Expected]) -> None:
    """Each token of a small step reads all keys that it sees."""
    small = Made(cases("llama").folder, "host, small steps", 16).executor._small

    def takes(start: int, count: int, decodes: int = 0) -> bool:
        segments = int32([0, start, count, 1]).reshape(1, 4)
        tokens, rows = np.zeros(count, np.int32), np.arange(decodes, dtype=np.int32)
        return small.takes(
            StepDescriptor(
                step=1,
                decode_rows=rows,
                max_length=start + count,
                segments=segments,
                prefill_tokens=tokens,
            )  # fmt: skip
        )

    assert takes(0, 32) and not takes(0, 33)
    assert takes(0, 20, decodes=12) and not takes(0, 20, decodes=13)
    most = MOST_KEYS_READ // 32 - 17
    assert takes(most, 32) and not takes(most + 1, 32)


def test_buckets_cover_every_number_of_rows() -> None:
    assert buckets_up_to(256)[-1] == 256 and buckets_up_to(300)[-2:] == (256, 300)
    assert buckets_up_to(1024)[-1] == 1024 and buckets_up_to(2000)[-1] == MOST_ROWS
    assert buckets_up_to(6) == (1, 2, 4, 6) and buckets_up_to(1) == (1,)


def _engine(folder: Path, device: str, **settings: object) -> Engine:
    whole = {"max_running": 4, "page_size": 16, "max_model_len": 128, "max_kv_tokens": 640}
    config = EngineConfig(folder, device=device, dtype="float32", **{**whole, **settings})  # type: ignore[arg-type]
    return build_engine(config)


def _requests(count: int) -> Iterator[Request]:
    """Prompts of 1 to 49 tokens, half of them with a common beginning; half of them greedy."""
    generator = torch.Generator().manual_seed(11)
    common = torch.randint(VOCAB, (33,), generator=generator)
    for index in range(count):
        own = torch.randint(VOCAB, (1 + 3 * index % 17,), generator=generator)
        ids = torch.cat((common, own)) if index % 2 else own
        params = SamplingParams(
            max_new_tokens=5 + index % 7, temperature=0.7 * (index % 4 > 1), ignore_eos=True
        )
        yield Request(index, ids.to(torch.int32).numpy(), params, seed=index)


def _run(engine: Engine, count: int = 14) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in range(count)]
    for request in _requests(count):
        engine.submit(request)
    while engine.has_work:
        output = engine.step()
        if output is not None:
            for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
                outputs[request_id].append(int(token))
    engine.check_integrity()
    engine.close()
    return outputs


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [
    {},
    {"overlap": False},
    {"cuda_graph_max_rows": 0},
    {"cuda_graph_max_rows": 2},
    {"page_size": 1},
    {"page_size": 64},
    {"prefill_budget": 16},
    {"cache": "naive"},
    {"max_kv_tokens": 160},
], ids=str)  # fmt: skip
def test_whole_engines_agree_with_the_cpu(
    settings: dict[str, object], cases: Callable[[str], Expected]
) -> None:
    folder = cases("qwen3").folder
    assert _run(_engine(folder, "cuda", **settings)) == _run(_engine(folder, "cpu", overlap=False))


@pytest.mark.gpu
def test_bfloat16_goes_through_the_kernels_alike(
    cases: Callable[[str], Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs, overlap and eager steps launch the same kernels: the same ids to the last one.

    Whether changes are taken from the ring or staged makes no difference either.
    """
    folder = cases("qwen3").folder
    settings = {"dtype": "bfloat16", "max_model_len": 128, "max_running": 4}

    def run(**more: object) -> list[list[int]]:
        return _run(build_engine(EngineConfig(folder, device="cuda", **{**settings, **more})))  # type: ignore[arg-type]

    plain = run(cuda_graph_max_rows=0, overlap=False, max_kv_tokens=4096)
    assert run() == plain
    assert run(overlap=False) == plain
    monkeypatch.setattr("engine.cuda_executor.CHANGE_WORDS", 0)
    assert run() == plain
