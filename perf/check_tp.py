"""Whether several ranks say what one says, on the devices that serve: a check, not a measurement.

`torchrun --nproc-per-node N -m perf.check_tp --model FOLDER [--device cuda] [--dtype float32]`

Rank 0 first runs the whole model by itself, then all ranks run it together: the same requests,
prompts in parts, more arriving with every step, greedy and seeded, with a penalty and with
logprobs. Weights are those of FOLDER, or random with `--load-format dummy`. In bfloat16 two best
logits are often equal, and sums in another order then choose the other: the share of equal tokens
is told, and float32 is what must be exact. Exit code 1 where it is not. Seeded draws are among 40:
random weights make 150,000 ids nearly as likely as each other, and between those one rank alone
draws another now and then once its prompts come in other parts.
"""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

import click
import numpy as np
import torch
import torch.distributed as dist

from engine.build import build_engine, build_executor
from engine.config import Dtype, EngineConfig, LoadFormat
from engine.core import Engine
from engine.model_config import read_model_config
from engine.rank_group import device_of_rank
from engine.request import Request, SamplingParams
from gpu_ops.process_group import ProcessGroup
from runtime.ranks.links import LinkClosed
from runtime.ranks.meeting import await_ranks, meet_rank_0
from runtime.ranks.rank import Rank

MEET_S: Final = 600.0  # the others wait while rank 0 runs alone
NEW: Final = 24
GREEDY: Final = SamplingParams(NEW, temperature=0.0, ignore_eos=True)
KINDS: Final = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1, top_k=40, top_p=0.95),
    replace(GREEDY, repetition_penalty=1.2),
    replace(GREEDY, logprobs=2),
)
Answers = dict[int, list[int]]


def answers(engine: Engine, vocabulary: int) -> Answers:
    """The ids of 24 requests, by number."""
    dice = np.random.default_rng(3)
    coming = [
        Request(n, dice.integers(0, vocabulary, 1 + 7 * n).astype(np.int32), KINDS[n % 4], seed=n)
        for n in range(24)
    ]
    told: Answers = {request.id: [] for request in coming}
    while coming or engine.has_work:
        if coming:
            engine.submit(coming.pop(0))
        output = engine.step()
        if output is not None:
            for number, token in zip(
                output.request_ids.tolist(), output.token_ids.tolist(), strict=True
            ):
                told[number].append(token)
    engine.check_integrity()
    return told


def execute(config: EngineConfig, place: Rank, group: ProcessGroup) -> None:
    """What a rank above 0 does: every block, until no more come."""
    link, steps = meet_rank_0(place, MEET_S)
    executor = build_executor(config, group)
    try:
        while True:
            block = steps.receive(1.0)
            if block is not None:
                executor.launch_no_sync(block)
    except LinkClosed:
        executor.close()
    link.close()


def compare(expected: Answers, told: Answers) -> tuple[float, list[str]]:
    """The share of tokens up to which answers are the same, and a line for each that is not."""
    same, differing = 0, []
    for number, ids in expected.items():
        equal = int((np.array(ids) == np.array(told[number])).cumprod().sum())
        same += equal
        if equal < NEW:
            differing.append(f"request {number} from token {equal} on, {KINDS[number % 4]}")
    return same / (NEW * len(expected)), differing


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(get_args(Dtype)), default="float32", show_default=True)
@click.option(
    "--load-format", type=click.Choice(get_args(LoadFormat)), default="auto", show_default=True
)
def main(model: Path, device: str, dtype: Dtype, load_format: LoadFormat) -> None:
    place = Rank.of_environment()
    config = EngineConfig(
        model, device=device, dtype=dtype, load_format=load_format, page_size=16, max_running=16,
        max_model_len=256, max_kv_tokens=4096, prefill_budget=64, cpu_threads=1,
    )  # fmt: skip
    config = device_of_rank(config, place.local_rank, place.local_size)
    if device == "cuda":
        torch.cuda.set_device(config.device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    group, vocabulary = ProcessGroup(), read_model_config(model).vocab_size
    if place.rank > 0:
        execute(config, place, group)
        return
    alone = build_engine(config)
    expected = answers(alone, vocabulary)
    alone.close()
    del alone
    if device == "cuda":
        # Ranks compare how much memory is free on their GPUs.
        gc.collect()
        torch.cuda.empty_cache()
    links, others = await_ranks(place, MEET_S)
    engine = build_engine(config, group=group, others=others)
    share, differing = compare(expected, answers(engine, vocabulary))
    engine.close()
    for link in links:
        link.close()
    sums = "apart from norms" if group.fused is None else "fused with norms"
    print(
        f"{place.size} ranks, {config.device}, {dtype}, sums {sums}: "
        f"{share:.2%} of the tokens are equal"
    )
    for line in differing:
        print(line)
    sys.exit(share < 1 and dtype == "float32")


if __name__ == "__main__":
    main()
