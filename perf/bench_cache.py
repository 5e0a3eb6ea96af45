"""What the prefix cache saves, and what its tier in host memory adds and costs.

    python -m perf.bench_cache                       # Qwen3-0.6B with dummy weights, on a GPU
    python -m perf.bench_cache --tiny                # the same in small, on a CPU: a trial

All runs are of one engine each, without a server, greedy, EOS ignored, seeded.
- shared prefix: clients with one long beginning in common, and a short end of their own.
- conversations: clients take turns; every prompt is all that was said before, and something new. A
  client speaks again once it was answered.
Each with the cache on and off. Then conversations with a pool that holds a tenth of what they come
to: without a host tier, and with one, write-through and write-back. Last, the copies: bandwidth of
pages that go out and in on their stream alone, and decode steps beside such copies against decode
steps without.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.descriptor import (
    JOINED_WORDS,
    NO_COPIES,
    PAGE_IN,
    PAGE_OUT,
    PageCopies,
    StepDescriptor,
)
from engine.executor import Executor, LaunchedStep
from engine.kv_cache import page_bytes
from engine.limits import COPIED_BYTES_A_STEP
from engine.load import load_model
from engine.request import Int32Array, Request, SamplingParams
from perf.bench_decode_graph import SHAPES
from perf.results import save
from perf.workloads import write_config


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How large the workloads are; lengths in tokens."""

    clients: int
    turns: int
    new_in: int
    new_out: int
    system: int
    page_size: int
    copy_steps: int  # of a measurement of copies
    most_copied: int  # pages of such a step

    @property
    def context(self) -> int:
        """Of the longest request, in whole pages."""
        longest = max(self.turns * (self.new_in + self.new_out), self.system + self.new_in)
        return -(-(longest + self.new_out) // self.page_size) * self.page_size

    @property
    def conversation_tokens(self) -> int:
        """All that the conversations come to."""
        return self.clients * self.turns * (self.new_in + self.new_out)


FULL: Final = Size(64, 8, 200, 200, 2048, 64, 200, 1 << 20)
TINY: Final = Size(4, 3, 20, 6, 64, 8, 5, 3)
_NO_ROWS: Final = np.empty(0, np.int32)


class Clients:
    """Runs conversations on an engine, and takes the times. Owned by the caller."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0
        self.ttft_s: list[float] = []
        self.cached = self.from_host = self.prompt_tokens = self.output_tokens = 0

    def run(self, histories: list[Int32Array], ends: list[list[Int32Array]], out: int) -> float:
        """Every client says its `ends` one after the other; seconds until all are answered."""
        engine = self._engine
        left = [list(client) for client in ends]
        said = list(histories)
        clients: dict[int, int] = {}
        begun_s: dict[int, float] = {}

        def speak(client: int) -> None:
            said[client] = np.concatenate([said[client], left[client].pop(0)])
            params = SamplingParams(max_new_tokens=out, temperature=0.0, ignore_eos=True)
            number, self._number = self._number, self._number + 1
            clients[number], begun_s[number] = client, time.perf_counter()
            self.prompt_tokens += len(said[client])
            engine.submit(Request(number, said[client], params, seed=0))

        begun = time.perf_counter()
        for client in range(len(said)):
            speak(client)
        answers: dict[int, list[int]] = {}
        while engine.has_work:
            output = engine.step()
            if output is None:
                continue
            now = time.perf_counter()
            for started in output.started:
                self.ttft_s.append(now - begun_s[started.request.id])
                self.cached += started.cached_tokens
                self.from_host += started.host_tokens
            triples = zip(output.request_ids, output.token_ids, output.finishes, strict=True)
            for number, token, finish in triples:
                answers.setdefault(int(number), []).append(int(token))
                self.output_tokens += 1
                if finish:
                    client = clients[int(number)]
                    answer = np.array(answers.pop(int(number)), np.int32)
                    said[client] = np.concatenate([said[client], answer])
                    if left[client]:
                        speak(client)
        return time.perf_counter() - begun

    def figures(self, wall_s: float) -> dict[str, Any]:
        stats = self._engine.stats()
        return {
            "wall_s": wall_s,
            "ttft_p50_ms": 1e3 * float(np.median(self.ttft_s)),
            "ttft_p99_ms": 1e3 * float(np.quantile(self.ttft_s, 0.99)),
            "output_tokens_per_s": self.output_tokens / wall_s,
            "prompt_tokens_per_s": self.prompt_tokens / wall_s,
            "cached_share": self.cached / self.prompt_tokens,
            "from_host_share": self.from_host / self.prompt_tokens,
            "retractions": stats.retractions,
            "steps": stats.steps,
            "host_pages": stats.host._asdict(),
        }


class Bench:
    """A model, and engines around it. Owned by the caller."""

    def __init__(self, config: EngineConfig, size: Size) -> None:
        self._config, self._size = config, size
        _, self.model = load_model(
            config.model, device=config.device, dtype=config.dtype, load_format="dummy"
        )
        self._vocabulary = min(10_000, self.model.config.vocab_size)

    @property
    def page_bytes(self) -> int:
        return page_bytes(self.model.config, self._config.page_size, self.model.dtype)

    def engine(self, **settings: Any) -> Engine:
        return assemble_engine(dataclasses.replace(self._config, **settings), self.model)

    def ids(self, rng: np.random.Generator, count: int) -> Int32Array:
        return rng.integers(0, self._vocabulary, count).astype(np.int32)

    def shared_prefix(self, **settings: Any) -> dict[str, Any]:
        """Everyone begins with one system prompt; all but the first find it cached."""
        size, rng = self._size, np.random.default_rng(1)
        system = self.ids(rng, size.system)
        ends = [[self.ids(rng, size.new_in)] for _ in range(size.clients)]
        return self._run([system] * size.clients, ends, settings)

    def conversations(self, **settings: Any) -> dict[str, Any]:
        """Every client has a history of its own."""
        size, rng = self._size, np.random.default_rng(2)
        ends = [
            [self.ids(rng, size.new_in) for _ in range(size.turns)] for _ in range(size.clients)
        ]
        return self._run([np.empty(0, np.int32)] * size.clients, ends, settings)

    def _run(
        self, histories: list[Int32Array], ends: list[list[Int32Array]], settings: dict[str, Any]
    ) -> dict[str, Any]:
        engine = self.engine(**settings)
        self._warm_up(engine)
        clients = Clients(engine)
        wall_s = clients.run(histories, ends, self._size.new_out)
        engine.check_integrity()
        figures = clients.figures(wall_s)
        engine.close()
        return {"settings": settings, **figures}

    def _warm_up(self, engine: Engine) -> None:
        """Whatever is set up with the first steps."""
        rng, size = np.random.default_rng(0), self._size
        prompts = [self.ids(rng, size.new_in) for _ in range(size.clients)]
        Clients(engine).run([np.empty(0, np.int32)] * size.clients, [[p] for p in prompts], 8)
        engine.flush_cache()


class CopyDriver:
    """Steps made by hand: copies, decode rows, or both. Owned by the caller."""

    def __init__(self, executor: Executor, rows: int, pages: int, steps: int) -> None:
        """
        rows   that decode
        pages  that a step copies
        steps  of each measurement
        """
        self._executor, self._rows, self._copied, self._steps = executor, rows, pages, steps
        self._step = 0
        self._first_free = 1
        self._launched: list[LaunchedStep] = []

    def begin_decoding(self) -> None:
        """The rows get a token, and pages for all measurements."""
        size, rows = self._executor.page_size, np.arange(self._rows, dtype=np.int32)
        each = -(-(2 + 4 * (self._steps + 2)) // size)
        pages = np.arange(1, 1 + self._rows * each, dtype=np.int32)
        self._first_free = 1 + len(pages)
        joined = np.zeros((self._rows, JOINED_WORDS), np.int32)
        joined[:, 0] = rows
        zeros, ones = np.zeros_like(rows), np.ones_like(rows)
        index = np.tile(np.arange(each, dtype=np.int32), self._rows)
        self._launch(
            joined=joined,
            page_writes=np.stack([rows.repeat(each), index, pages], axis=1),
            segments=np.stack([rows, zeros, ones, ones], axis=1),
            prefill_tokens=rows + 1,
        )

    def copy_gb_per_s(self, direction: int, page_bytes: int) -> float:
        """Of copies alone."""
        wall_s = self._timed(lambda: self._launch(copies=self._copies(direction)))
        return self._steps * self._copied * page_bytes / wall_s / 1e9

    def decode_ms(self, direction: int | None) -> float:
        """Of a step, beside copies in this direction."""
        rows = np.arange(self._rows, dtype=np.int32)
        copies = NO_COPIES if direction is None else self._copies(direction)
        return 1e3 * self._timed(lambda: self._launch(rows, copies=copies)) / self._steps

    def _copies(self, direction: int) -> PageCopies:
        slots = np.arange(1, 1 + self._copied, dtype=np.int32)
        pages = slots - 1 + self._first_free
        return PageCopies(np.stack([np.full_like(slots, direction), pages, slots], axis=1))

    def _timed(self, launch: Callable[[], None]) -> float:
        """Seconds for all steps, their copies included."""
        launch()
        self._finish()
        begun = time.perf_counter()
        for _ in range(self._steps):
            launch()
            if len(self._launched) > 1:
                self._launched.pop(0).wait_tokens_sync()
        self._finish()
        return time.perf_counter() - begun

    def _finish(self) -> None:
        self._launch()  # which waits for the copies before it
        for step in self._launched:
            step.wait_tokens_sync()
        self._launched.clear()

    def _launch(self, decode_rows: Int32Array = _NO_ROWS, **parts: Any) -> None:
        self._step += 1
        descriptor = StepDescriptor(self._step, decode_rows, max_length=1, **parts)
        self._launched.append(self._executor.launch_no_sync(descriptor.encode()))


def measure_copies(bench: Bench, size: Size) -> dict[str, Any]:
    """Pages out and in: alone, and beside decode steps."""
    pages = max(1, min(COPIED_BYTES_A_STEP // bench.page_bytes, size.most_copied))
    each = -(-(2 + 4 * (size.copy_steps + 2)) // size.page_size)
    engine = bench.engine(
        max_kv_tokens=(1 + size.clients * each + pages) * size.page_size,
        max_model_len=each * size.page_size,
        max_running=size.clients,
        host_cache_gib=(pages + 2) * bench.page_bytes / 2**30,
    )
    driver = CopyDriver(engine._executor, size.clients, pages, size.copy_steps)
    driver.begin_decoding()
    found = {
        "rows": size.clients,
        "pages_a_step": pages,
        "mb_a_step": pages * bench.page_bytes / 1e6,
        "out_gb_per_s": driver.copy_gb_per_s(PAGE_OUT, bench.page_bytes),
        "in_gb_per_s": driver.copy_gb_per_s(PAGE_IN, bench.page_bytes),
        "decode_ms": driver.decode_ms(None),
        "decode_beside_out_ms": driver.decode_ms(PAGE_OUT),
        "decode_beside_in_ms": driver.decode_ms(PAGE_IN),
    }
    engine.close()
    return found


@click.command()
@click.option("--model", type=click.Choice(list(SHAPES)), default="0.6B", help="Shape of Qwen3.")
@click.option("--tiny", is_flag=True, help="A small model and small workloads, on a CPU.")
@click.option("--host-gib", default=48.0, help="Host tier of the runs with one.")
def main(model: str, tiny: bool, host_gib: float) -> None:
    size = TINY if tiny else FULL
    with tempfile.TemporaryDirectory() as folder:
        path = _write_tiny(Path(folder)) if tiny else write_config(Path(folder), model)
        config = EngineConfig(
            path,
            device="cpu" if tiny else "cuda",
            load_format="dummy",
            page_size=size.page_size,
            max_running=size.clients,
            max_model_len=size.context,
            max_kv_tokens=2 * size.conversation_tokens,
        )
        bench = Bench(config, size)
        small = max(size.conversation_tokens // 10, size.context)
        tenth = {"max_kv_tokens": small}
        host = {**tenth, "host_cache_gib": 0.05 if tiny else host_gib}
        runs = {
            "shared prefix": [
                bench.shared_prefix(cache="naive"), bench.shared_prefix(cache="radix"),
            ],
            "conversations": [
                bench.conversations(cache="naive"), bench.conversations(cache="radix"),
            ],
            "conversations, a tenth of the pool": [
                bench.conversations(**tenth),
                bench.conversations(**host, host_cache_write="through"),
                bench.conversations(**host, host_cache_write="back"),
            ],
        }  # fmt: skip
        copies = measure_copies(bench, size)
    figures = {
        "model": "tiny" if tiny else model,
        "device": str(bench.model.device),
        "size": dataclasses.asdict(size),
        "working_set_tokens": size.conversation_tokens,
        "runs": runs,
        "copies": copies,
    }
    _show(runs, copies)
    if not tiny:
        print(save("bench_cache", figures, torch.cuda.get_device_name()))


def _show(runs: dict[str, list[dict[str, Any]]], copies: dict[str, Any]) -> None:
    names = ("ttft_p50_ms", "output_tokens_per_s", "cached_share", "from_host_share")
    for title, cells in runs.items():
        table = Table("settings", *names, title=title)
        for cell in cells:
            label = " ".join(f"{name}={value}" for name, value in cell["settings"].items())
            table.add_row(label, *(f"{cell[name]:.4g}" for name in names))
        Console().print(table)
    Console().print(copies)


def _write_tiny(folder: Path) -> Path:
    shape = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "float32",
        "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


if __name__ == "__main__":
    main()
