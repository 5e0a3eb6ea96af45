"""Step descriptors on the CPU: transformers' greedy ids, however the work is cut into steps."""

from collections.abc import Callable

import pytest

from engine.cpu_executor import CpuExecutor
from engine.load import load_model
from engine.models.decoder import Decoder
from engine.request import SamplingParams
from tests.checkpoints import FAMILIES, VOCAB
from tests.engine.conftest import NEW_TOKENS, Expected
from tests.step_driver import StepDriver, int32

MAX_TOKENS = 64


@pytest.fixture(scope="module")
def model(expected: Callable[[str], Expected]) -> Decoder:
    return load_model(expected("llama").folder)[1]


def build_executor(model: Decoder, page_size: int, rows: int = 6) -> CpuExecutor:
    pages_per_row = -(-MAX_TOKENS // page_size)
    return CpuExecutor(
        model,
        pages=1 + rows * pages_per_row,
        page_size=page_size,
        max_rows=rows,
        max_pages_per_row=pages_per_row,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prompts_then_decode(
    family: str, page_size: int, expected: Callable[[str], Expected]
) -> None:
    case = expected(family)
    driver = StepDriver(build_executor(load_model(case.folder)[1], page_size))
    for row, (prompt, greedy) in enumerate(zip(case.prompts, case.greedy, strict=True)):
        assert driver.generate(row, prompt, NEW_TOKENS, chunk=8) == greedy


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "qwen3-moe"])
def test_mixed_steps(family: str, page_size: int, expected: Callable[[str], Expected]) -> None:
    """Rows decode while the next prompt is prefilled in the same step, then all decode together."""
    case = expected(family)
    driver = StepDriver(build_executor(load_model(case.folder)[1], page_size))
    outputs: list[list[int]] = []
    for row, prompt in enumerate(case.prompts):
        driver.join(row)
        earlier = [*range(row)]
        half = len(prompt) // 2
        if half:
            sampled = driver.step([(row, prompt[:half], False)], decode=earlier)
            _append(outputs, earlier, sampled)
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


def test_two_prompts_in_one_step(model: Decoder, expected: Callable[[str], Expected]) -> None:
    case = expected("llama")
    driver = StepDriver(build_executor(model, 16))
    for row in (0, 1, 2):
        driver.join(row)
    segments = [(row, case.prompts[row], row != 1) for row in (2, 1, 0)]
    assert driver.step(segments) == [case.greedy[2][0], case.greedy[0][0]]


def test_consecutive_pages(model: Decoder, expected: Callable[[str], Expected]) -> None:
    """Pages in order are read in place, on a path of their own."""
    case = expected("llama")
    executor = build_executor(model, 4)
    driver = StepDriver(executor, pages=range(1, executor.pages))
    assert driver.generate(2, case.prompts[2], NEW_TOKENS, chunk=64) == case.greedy[2]


def test_very_unequal_lengths(checkpoint: Callable[[str], object]) -> None:
    """Decode rows far apart in length are computed in groups; each as if it were alone."""
    _, model = load_model(checkpoint("qwen3"))  # type: ignore[arg-type]

    def fresh() -> StepDriver:
        return StepDriver(
            CpuExecutor(model, pages=80, page_size=16, max_rows=4, max_pages_per_row=30)
        )

    prompts = [[(7 * i + row) % VOCAB for i in range(n)] for row, n in enumerate((3, 400, 200, 9))]
    alone = []
    for row, prompt in enumerate(prompts):
        alone.append(fresh().generate(row, prompt, 6, chunk=512))
    driver = fresh()
    for row in range(4):
        driver.join(row)
    outputs = [[token] for token in driver.step([(r, prompts[r], True) for r in range(4)])]
    for _ in range(5):
        _append(outputs, [0, 1, 2, 3], driver.step(decode=[0, 1, 2, 3]))
    assert outputs == alone


def test_a_row_is_reused_with_new_parameters(
    model: Decoder, expected: Callable[[str], Expected]
) -> None:
    case = expected("llama")
    driver = StepDriver(build_executor(model, 16))
    driver.join(1, SamplingParams(max_new_tokens=0, temperature=3.0, seed=5))
    driver.step([(1, case.prompts[1], True)])
    assert driver.generate(1, case.prompts[2], NEW_TOKENS, chunk=16) == case.greedy[2]


def test_sampled_tokens_do_not_depend_on_chunks_or_mates(
    model: Decoder, expected: Callable[[str], Expected]
) -> None:
    prompt = expected("llama").prompts[3]
    params = SamplingParams(max_new_tokens=0, temperature=0.8, top_p=0.95, seed=-77)

    def run(mates: list[int], chunk: int) -> list[int]:
        driver = StepDriver(build_executor(model, 16))
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
    other_seed = SamplingParams(max_new_tokens=0, temperature=0.8, top_p=0.95, seed=-78)
    params = other_seed
    assert run([], 64) != alone


def test_a_step_without_tokens_applies_its_changes(model: Decoder) -> None:
    driver = StepDriver(build_executor(model, 16))
    driver.join(0)
    assert driver.step() == []
    assert len(driver.step([(0, [1, 2], True)])) == 1


def test_a_block_that_is_no_descriptor_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="not a step descriptor"):
        build_executor(model, 16).launch_no_sync(int32([1, 2, 3]))
