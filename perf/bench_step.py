"""The engine on one GPU, without a server: the offline workload, and where its time goes.

    python -m perf.bench_step [--model 0.6B] [--runs 3] [--profile 300] [--beside 1]

Random weights of the right shapes, prompts and outputs as token ids: no tokenizer takes part, so
detokenizing (a thread of its own in the server) is not in these figures. Wall time of a step is
taken where its tokens reach the host; host time is what the engine thread spends outside of waiting
for the device. --profile adds, from torch's profiler over 40 steps in the middle of a run, how long
the device stood idle, before which kernels, and how long these ran. --beside adds runs with so many
threads that do nothing but Python all the time, as tokenizing would, each after one without: what
they cost.
"""

import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch

import perf  # noqa: F401  (the path)
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.cuda_executor import CudaExecutor
from engine.descriptor import H_DECODE, H_SEGMENTS
from engine.executor import Executor, LaunchedStep
from engine.logprobs import StepLogprobs
from engine.request import Int32Array, Request, SamplingParams, StepOutput
from perf.gpu_timing import ceilings, device_facts
from perf.results import save
from perf.workloads import Workload, offline_seed_0, write_config

_PROFILED_STEPS: Final = 40
_BANDS: Final = ((248, 256), (120, 140), (56, 64), (1, 8))  # decode rows


class TimedStep:
    """A launched step that adds up how long the host waited for it."""

    def __init__(self, step: LaunchedStep, owner: "TimedExecutor") -> None:
        self._step, self._owner = step, owner

    def wait_tokens_sync(self) -> Int32Array:
        begun = time.perf_counter()
        ids = self._step.wait_tokens_sync()
        ended = time.perf_counter()
        self._owner.waited_s += ended - begun
        self._owner.done_s.append(ended)
        return ids

    def wait_logprobs_sync(self) -> StepLogprobs | None:
        return self._step.wait_logprobs_sync()


class TimedExecutor:
    """An executor with a stop watch at both ends. Owned by one thread."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.pages, self.page_size = executor.pages, executor.page_size
        self.vocab_size = executor.vocab_size
        self.clear()

    def clear(self) -> None:
        self.waited_s = 0.0
        self.launch_s: list[float] = []
        self.kinds: list[tuple[int, int]] = []  # decode rows, segments, of each launched step
        self.done_s: list[float] = []
        self.host_s: list[float] = []  # in `step`, for each launched step, without waiting

    def step(self, engine: Engine) -> StepOutput | None:
        """The engine's next step, timed."""
        launched, waited_s, begun = len(self.kinds), self.waited_s, time.perf_counter()
        output = engine.step()
        if len(self.kinds) > launched:
            self.host_s.append(time.perf_counter() - begun - (self.waited_s - waited_s))
        return output

    def launch_no_sync(self, descriptor: Int32Array) -> TimedStep:
        begun = time.perf_counter()
        self.kinds.append((int(descriptor[H_DECODE]), int(descriptor[H_SEGMENTS])))
        step = TimedStep(self.executor.launch_no_sync(descriptor), self)
        self.launch_s.append(time.perf_counter() - begun)
        return step

    def close(self) -> None:
        self.executor.close()


def submit(engine: Engine, load: Workload, first_id: int) -> None:
    for index, (prompt, new) in enumerate(zip(load.prompts, load.new_tokens, strict=True)):
        params = SamplingParams(new, temperature=load.temperature, ignore_eos=True)
        ids = np.array(prompt, np.int32)
        engine.submit(Request(first_id + index, ids, params, seed=first_id + index))


def run(engine: Engine, timed: TimedExecutor, load: Workload, first_id: int) -> dict[str, Any]:
    """One run of the workload, from the first submission to the last token on the host."""
    timed.clear()
    before, tokens = engine.stats(), 0
    begun = time.perf_counter()
    submit(engine, load, first_id)
    while engine.has_work:
        output = timed.step(engine)
        if output is not None:
            tokens += len(output.token_ids)
    wall_s = time.perf_counter() - begun
    assert tokens == load.output_tokens
    engine.check_integrity()
    steps = len(timed.kinds)
    scheduling_s = engine.stats().host_s - before.host_s
    return {
        "tokens_per_s": tokens / wall_s,
        "wall_s": wall_s,
        "steps": steps,
        "prefill_steps": sum(1 for _, segments in timed.kinds if segments),
        "scheduling_ms_per_step": 1e3 * scheduling_s / steps,
        "launch_ms_per_decode_step": 1e3 * median_decode_launch_s(timed),
        "launch_ms_per_step": 1e3 * sum(timed.launch_s) / steps,
        "host_ms_per_step": 1e3 * (wall_s - timed.waited_s) / steps,
        "waited_share": timed.waited_s / wall_s,
        "decode_ms": decode_times(timed),
        "decode_host_ms": decode_host_times(timed),
        "prefill_part_s": prefill_part_s(timed),
    }


@contextmanager
def threads_beside(count: int) -> Iterator[None]:
    """So many threads work on text of their own meanwhile; all have ended afterwards."""
    ended = threading.Event()

    def work() -> None:
        said = {"text": "the quick brown fox jumps over the lazy dog " * 8}
        while not ended.is_set():
            words = json.loads(json.dumps(said))["text"].split()
            assert len(sorted(set(words))) == 8

    threads = [threading.Thread(target=work, name=f"beside-{n}") for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def cost_of_threads(engine: Engine, timed: TimedExecutor, runs: int, count: int) -> dict[str, Any]:
    """Tokens a second without and with `count` busy threads, in turn; medians of `runs` each."""
    load, rates = offline_seed_0(), dict[int, list[float]]()
    for index in range(2 * runs):
        forget_prompts(engine)
        with threads_beside(beside := count * (index % 2)):
            result = run(engine, timed, load, 200_000 + 1000 * index)
        rates.setdefault(beside, []).append(result["tokens_per_s"])
        print(f"{beside} threads beside: {result['tokens_per_s']:.0f} tokens/s", flush=True)
    without, with_them = statistics.median(rates[0]), statistics.median(rates[count])
    return {"threads": count, "rates": rates, "cost_share": 1 - with_them / without}


def median_decode_launch_s(timed: TimedExecutor) -> float:
    pairs = zip(timed.launch_s, timed.kinds, strict=True)
    return statistics.median(launch_s for launch_s, (_, segments) in pairs if not segments)


def forget_prompts(engine: Engine) -> None:
    """So that the next run computes them again."""
    scheduler = engine._scheduler
    scheduler.holdings.pool.give(scheduler.holdings.cache.clear())


def decode_times(timed: TimedExecutor) -> dict[str, float]:
    """Median wall time of pure decode steps, by number of rows."""
    taken_s = np.diff(timed.done_s).tolist()
    return _medians_ms(
        (rows, took_s)
        for (rows, segments), took_s in zip(timed.kinds[1:], taken_s, strict=True)
        if not segments
    )


def decode_host_times(timed: TimedExecutor) -> dict[str, float]:
    """Median host time of launching a pure decode step and committing the one before, likewise."""
    kinds = zip(timed.kinds, timed.kinds[1:], timed.host_s[1:], strict=False)
    return _medians_ms(
        (rows, host_s)
        for (_, before), (rows, segments), host_s in kinds
        if not segments and not before
    )


def _medians_ms(steps: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Of (rows, seconds), by _BANDS."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for rows, seconds in steps:
        for low, high in _BANDS:
            if low <= rows <= high:
                found[low, high].append(1e3 * seconds)
    return {f"{low}-{high}": round(statistics.median(v), 3) for (low, high), v in found.items()}


def prefill_part_s(timed: TimedExecutor) -> float:
    """Time until the last step with prefill in it was done."""
    last = max(index for index, (_, segments) in enumerate(timed.kinds) if segments)
    return timed.done_s[last] - timed.done_s[0]


def replay_host_ms(executor: CudaExecutor) -> dict[int, float]:
    """Host time of launching a decode graph, by rows, on an idle device."""
    found = {}
    decode = executor._decode
    for rows in decode.graphs.sizes:
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            decode.run(rows)
            times.append(1e3 * (time.perf_counter() - begun))
        found[rows] = round(statistics.median(times), 4)
    torch.cuda.synchronize()
    return found


def profiled(engine: Engine, load: Workload, first_id: int, after: int) -> dict[str, Any]:
    """What the device did in _PROFILED_STEPS steps, `after` steps into the workload."""
    from torch.profiler import ProfilerActivity, profile  # loads CUPTI: only where asked for

    submit(engine, load, first_id)
    for _ in range(after):
        engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    return device_time(spans)


def device_time(spans: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Spans are (start, end, name) in µs, ascending; kernels may overlap (dependent launch)."""
    busy_until, idle, between = spans[0][0], 0.0, 0.0
    by_name: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, float] = defaultdict(float)
    for start, end, name in spans:
        gap = max(0.0, start - busy_until)
        idle += gap
        if "prepare_decode" in name or "apply_changes" in name or "Memcpy" in name:
            between += gap
        gaps[name] += gap
        by_name[name].append(max(0.0, end - max(start, busy_until)))
        busy_until = max(busy_until, end)
    whole = busy_until - spans[0][0]
    kernels = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "steps": _PROFILED_STEPS,
        "ms_per_step": whole / _PROFILED_STEPS / 1e3,
        "idle_share": idle / whole,
        "idle_between_steps_share": between / whole,
        "kernels": [
            {
                "name": name[:90],
                "us_per_step": sum(us) / _PROFILED_STEPS,
                "idle_before_us_per_step": gaps[name] / _PROFILED_STEPS,
                "count": len(us),
            }
            for name, us in kernels
        ],
    }


@click.command()
@click.option("--model", default="0.6B")
@click.option("--runs", default=3)
@click.option("--page-size", default=64)
@click.option("--prefill-budget", default=16_384)
@click.option("--profile", "profile_after", multiple=True, type=int, help="Steps into the run.")
@click.option("--beside", default=0, help="Busy threads in runs with and without such.")
@click.option("--suffix", default="", help="Of the result's name.")
def main(
    model: str,
    runs: int,
    page_size: int,
    prefill_budget: int,
    profile_after: tuple[int, ...],
    beside: int,
    suffix: str,
) -> None:
    measured = ceilings()
    torch.cuda.empty_cache()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            write_config(Path(folder), model),
            device="cuda",
            load_format="dummy",
            page_size=page_size,
            max_running=256,
            max_model_len=4096,
            prefill_budget=prefill_budget,
            target_itl_ms=0,
        )
        engine = build_engine(config)
    ready_s = time.perf_counter() - begun
    print(f"ready after {ready_s:.1f} s, {engine.facts.kv_tokens} tokens of KV", flush=True)
    executor = engine._executor
    assert isinstance(executor, CudaExecutor)
    replays = replay_host_ms(executor)  # of the dummy row: nothing has been asked for yet
    print("host ms of a replay", replays)
    timed = engine._executor = TimedExecutor(executor)
    load = offline_seed_0()
    run(engine, timed, Workload([[1, 2, 3]], [8], 0.6), 0)
    results = []
    for index in range(runs):
        forget_prompts(engine)
        results.append(run(engine, timed, load, 1000 * (index + 1)))
        print(results[-1], flush=True)
    profiles = {}
    for index, after in enumerate(profile_after):
        forget_prompts(engine)
        profiles[after] = profiled(engine, load, 100_000 + 1000 * index, after)
        show(profiles[after])
    cost = cost_of_threads(engine, timed, runs, beside) if beside else None
    figures = {
        "model": model,
        "ready_s": ready_s,
        "threads_beside": cost,
        "kv_tokens": engine.facts.kv_tokens,
        "tokens_per_s": statistics.median(result["tokens_per_s"] for result in results),
        "runs": results,
        "replay_host_ms": replays,
        "profiles": profiles,
        "ceilings": measured,
        **device_facts(),
    }
    print(f"median {figures['tokens_per_s']:.0f} tokens/s")
    print(save(f"bench_step_{model}{suffix}", figures, figures["gpu"]))


def show(figures: dict[str, Any]) -> None:
    print({key: value for key, value in figures.items() if key != "kernels"})
    for kernel in figures["kernels"]:
        us, idle = kernel["us_per_step"], kernel["idle_before_us_per_step"]
        print(f"   {us:9.1f} us, {idle:5.1f} idle before  {kernel['count']:5d}  {kernel['name']}")


if __name__ == "__main__":
    main()
