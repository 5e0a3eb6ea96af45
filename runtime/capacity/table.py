"""The capacity report for people: tables on a terminal, and a few lines while a server starts."""

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.table import Table

from runtime.capacity.gpu import Gpu, GpuMemory
from runtime.capacity.report import Capacity, Concurrency, Split

_GIB: Final = 1 << 30
_UNKNOWN: Final = "?"
# The cell that stands for a chat in the short form: prompt and output tokens.
_CHAT: Final = (1024, 128)


def show(report: Capacity, console: Console) -> None:
    """The whole report."""
    for table in _tables(report):
        if table.row_count:
            console.print(table)
    host = report.host
    console.print(
        f"This machine: {host.cpus} cores, {gib(host.memory_available_bytes)} of "
        f"{gib(host.memory_total_bytes)} of memory available.",
        highlight=False,
    )
    for note in report.notes:
        console.print(note, highlight=False)


def summary(report: Capacity) -> list[str]:
    """What a server says of it while it starts: lines for each GPU, the model and each note."""
    lines = [_gpu_line(gpu) for gpu in report.devices.gpus]
    if report.model is not None and report.split is not None:
        lines.append(_model_line(report, report.split))
    return lines + list(report.notes)


def gib(count: int | None) -> str:
    """Bytes as people read them."""
    return _UNKNOWN if count is None else f"{count / _GIB:.1f} GiB"


def _gpu_line(gpu: Gpu) -> str:
    memory = gpu.activity.memory
    free = "memory unknown" if memory is None else f"{gib(memory.free_bytes)} free"
    of = "" if memory is None else f" of {gib(memory.total_bytes)}"
    return f"GPU {gpu.index}: {gpu.name or 'unknown'}, {free}{of}"


def _model_line(report: Capacity, split: Split) -> str:
    model = report.model
    assert model is not None
    weights = f"{model.dtype} on {report.device}: {gib(split.weight_bytes)} of weights"
    if not split.fits:
        return f"{weights}; it does not fit: {split.why_not}"
    chat = [
        each for each in report.concurrency if (each.prompt_tokens, each.output_tokens) == _CHAT
    ]
    room = f"room for about {split.kv_tokens:,} tokens of keys and values"
    return f"{weights}; {room}{''.join(map(_chat_line, chat))}"


def _chat_line(cell: Concurrency) -> str:
    if not cell.requests:
        return ""
    return f"; {cell.requests} requests of {cell.prompt_tokens:,} + {cell.output_tokens} tokens"


def _tables(report: Capacity) -> Iterator[Table]:
    yield _gpus(report)
    yield _processes(report)
    yield _splits(report)
    yield _concurrency(report)
    yield _decode(report)


def _gpus(report: Capacity) -> Table:
    driver = report.devices.driver
    table = Table(
        "GPU", "name", "free", "used", "total", "power", "°C", "SM / memory MHz", "ECC", "PCIe",
        "NVLink", "slowed by", title=f"GPUs, driver {driver}",
    )  # fmt: skip
    for gpu in report.devices.gpus:
        doing, memory = gpu.activity, gpu.activity.memory
        table.add_row(
            str(gpu.index), gpu.name or _UNKNOWN,
            *_memory(memory),
            f"{_number(doing.power_w)} / {_number(doing.power_limit_w)} W",
            _number(doing.temperature_c),
            f"{_number(doing.sm_mhz)} / {_number(doing.memory_mhz)}",
            _ecc(gpu), f"gen {_number(gpu.pcie.generation)} x{_number(gpu.pcie.width)}",
            "-" if gpu.nvlink is None else f"{gpu.nvlink.active} of {gpu.nvlink.present}",
            _UNKNOWN if doing.throttled_by is None else ", ".join(doing.throttled_by) or "-",
        )  # fmt: skip
    return table


def _memory(memory: GpuMemory | None) -> tuple[str, str, str]:
    if memory is None:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    return gib(memory.free_bytes), gib(memory.used_bytes), gib(memory.total_bytes)


def _ecc(gpu: Gpu) -> str:
    ecc = gpu.activity.ecc
    if ecc is None or not ecc.enabled:
        return "-" if ecc is None else "off"
    return f"{_number(ecc.corrected)} corrected, {_number(ecc.uncorrected)} not"


def _processes(report: Capacity) -> Table:
    table = Table("GPU", "process", "name", "user", "memory", title="Programs on the GPUs")
    for gpu in report.devices.gpus:
        for each in gpu.processes or ():
            name = f"{each.name or _UNKNOWN}{' (this one)' if each.is_ours else ''}"
            table.add_row(
                str(gpu.index), str(each.pid), name, each.user or _UNKNOWN, gib(each.used_bytes)
            )  # fmt: skip
    return table


def _splits(report: Capacity) -> Table:
    model = report.model
    title = None
    if model is not None:
        title = (
            f"{model.name}: {model.parameters / 1e9:.2f} billion parameters, "
            f"{model.active_parameters / 1e9:.2f} of them active, {model.dtype}; "
            f"context {model.context_tokens:,} tokens, {model.kv_bytes_per_token:,} bytes each"
        )
    table = Table(
        "GPUs", "weights", "steps and driver", "KV pool", "KV tokens", "fits", title=title
    )  # fmt: skip
    for split in report.splits:
        fits = "yes" if split.fits else f"no: {split.why_not}"
        table.add_row(
            "CPU" if report.device == "cpu" else str(split.ranks), gib(split.weight_bytes),
            gib(split.context_bytes + split.workspace_bytes + split.graph_bytes),
            gib(split.kv_bytes), f"{split.kv_tokens:,}",
            fits if split.available else f"{fits} (with as many of these)",
        )  # fmt: skip
    return table


def _concurrency(report: Capacity) -> Table:
    table = Table("prompt", "output", "requests", "limited by", title="Requests at the same time")
    for cell in report.concurrency:
        table.add_row(
            f"{cell.prompt_tokens:,}", f"{cell.output_tokens:,}", str(cell.requests),
            cell.limited_by.replace("max_running", "--max-running"),
        )  # fmt: skip
    return table


def _decode(report: Capacity) -> Table:
    table = Table(
        "requests", "context", "reads", "bandwidth ms", "compute ms", "floor ms", "most tokens/s",
        title="A decode step: what no engine can beat",
    )  # fmt: skip
    for step in report.decode:
        table.add_row(
            str(step.batch), f"{step.context:,}", gib(step.bytes), _ms(step.bandwidth_s),
            _ms(step.compute_s), _ms(step.floor_s),
            _UNKNOWN if step.tokens_per_s is None else f"{step.tokens_per_s:,.0f}",
        )  # fmt: skip
    return table


def _ms(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{1e3 * seconds:.2f}"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}"
