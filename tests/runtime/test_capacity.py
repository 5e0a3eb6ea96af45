"""The capacity report: what fits, what is in the way, and how it is told."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import pynvml
import pytest
from click.testing import CliRunner
from rich.console import Console

from engine.config import EngineConfig
from engine.footprint import kv_token_bytes, parameters
from engine.model_config import parse_model_config
from httpd.openapi_insight import INSIGHT
from runtime.capacity import command
from runtime.capacity.estimate import Asked, report_on
from runtime.capacity.host import multiplies_bfloat16, read_host
from runtime.capacity.nvml import Nvml
from runtime.capacity.report import Capacity, Host
from runtime.capacity.table import show, summary
from runtime.capacity.visible import visible_gpus
from tests.fakes_insight import CAPACITY, LIVE, TIMELINE
from tests.fakes_nvml import GIB, FakeNvml

HOST = Host(16, 128 * GIB, 100 * GIB)
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MODEL = parse_model_config(SHAPE)
HUGE = replace(MODEL, layers=160, windows=(None,) * 160)


def asked(model: Any = MODEL, ranks: int = 1, **settings: Any) -> Asked:
    return Asked(EngineConfig(Path("m"), **settings), model, "m", ranks)


def report(
    what: Asked | None, fake: FakeNvml | None = None, environ: Mapping[str, str] | None = None
) -> Capacity:
    return report_on(Nvml(fake or FakeNvml()).read(), HOST, what, environ or {})


def test_a_model_that_fits() -> None:
    told = report(asked())
    split = told.split
    assert told.device == "cuda:0" and split is not None and split.fits and told.model is not None
    assert told.model.weight_bytes == 2 * parameters(MODEL)
    assert split.kv_bytes_per_token == kv_token_bytes(MODEL, 2) == 160 * 1024
    # All that is free, less weights and what steps take, times --memory-fraction.
    left = 130 * GIB - split.weight_bytes - split.context_bytes
    left -= split.workspace_bytes + split.graph_bytes
    assert split.kv_tokens == pytest.approx(0.85 * left / split.kv_bytes_per_token, rel=1e-3)
    cells = {(each.prompt_tokens, each.output_tokens): each for each in told.concurrency}
    assert cells[128, 128].requests == 256 and cells[128, 128].limited_by == "max_running"
    assert cells[8192, 512].requests == split.kv_tokens // 8704
    assert cells[8192, 512].limited_by == "memory"


def test_floors_of_a_decode_step() -> None:
    told = report(asked())
    floors = {(each.batch, each.context): each for each in told.decode}
    one = floors[1, 1024]
    # 14B in bf16 at 4.8 TB/s: 27.9 GB without the embedding.
    assert one.bandwidth_s == pytest.approx(27.98e9 / 4.8e12, rel=0.02)
    assert one.floor_s == one.bandwidth_s and one.tokens_per_s == pytest.approx(1 / one.floor_s)
    full = floors[256, 1024]
    assert full.bytes - one.bytes == 255 * 1024 * 160 * 1024
    assert full.compute_s is not None and full.bandwidth_s is not None
    assert full.compute_s > 200 * (one.compute_s or 0)
    assert (256, 8192) not in floors, "so many do not fit"


def test_more_gpus_hold_more() -> None:
    told = report(asked(HUGE), FakeNvml(gpus=2))
    by_ranks = {each.ranks: each for each in told.splits}
    assert told.split == by_ranks[1]
    assert [each.ranks for each in told.splits] == [1, 2, 4, 8]
    assert [each.available for each in told.splits] == [True, True, False, False]
    assert by_ranks[2].kv_bytes_per_token * 2 == by_ranks[1].kv_bytes_per_token
    assert by_ranks[4].kv_tokens > by_ranks[2].kv_tokens > by_ranks[1].kv_tokens
    assert report(asked(HUGE, ranks=2), FakeNvml(gpus=2)).split == by_ranks[2]
    odd = report(asked(ranks=3), FakeNvml(gpus=3))
    assert odd.split is not None and odd.split.ranks == 3 and odd.split.available
    many = report(asked(ranks=999))
    assert many.split is None and "999 GPUs cannot share this model." in many.notes


def test_a_model_that_does_not_fit() -> None:
    fake = FakeNvml()
    fake.used = 120 * GIB
    told = report(asked(), fake)
    assert told.split is not None and not told.split.fits and told.split.kv_tokens == 0
    assert told.split.why_not and told.decode == ()
    assert all(each.requests == 0 for each in told.concurrency)
    too_much = report(asked(max_kv_tokens=10_000_000))
    assert too_much.split is not None and "are free" in (too_much.split.why_not or "")


def test_a_second_user_of_the_gpu_is_named() -> None:
    fake = FakeNvml()
    fake.processes = [(1, 3 * GIB)]
    (note,) = report(asked(), fake).notes
    assert note.startswith("GPU 0 is used by another program: process 1, ")
    assert "3072 MiB" in note


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_it_is_the_cpu(device: str) -> None:
    fake = FakeNvml()
    fake.failures = {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}
    small = replace(MODEL, layers=2, windows=(None, None))
    told = report(asked(small, device=device), fake)
    assert told.device == "cpu" and told.split is not None and told.split.fits
    assert told.model is not None and told.model.dtype == "float32"
    assert told.split.kv_bytes <= 4 * GIB + 64 * told.split.kv_bytes_per_token
    assert told.notes[0].startswith("No GPU is seen: NVML cannot be used")
    assert "NVML Shared Library Not Found" in told.notes[0]
    bf16 = replace(asked(small, device=device), cpu_bfloat16=True)
    cpu = report_on(Nvml(fake).read(), HOST, bf16, {})
    assert cpu.model is not None and cpu.model.dtype == "bfloat16"


def test_an_old_gpu_is_not_used() -> None:
    fake = FakeNvml()
    fake.name = "NVIDIA A100-SXM4-80GB"
    fake._answers["nvmlDeviceGetCudaComputeCapability"] = lambda _gpu: (8, 0)
    told = report(asked(), fake)
    assert told.device == "cpu" and "A100-SXM4-80GB is older" in told.notes[-1]


def test_visible_devices() -> None:
    gpus = Nvml(FakeNvml(gpus=3)).read().gpus

    def seen(named: str | None) -> list[int]:
        environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
        return [gpu.index for gpu in visible_gpus(gpus, environ)]

    assert seen(None) == [0, 1, 2] and seen("") == []
    assert seen("2,0") == [2, 0] and seen("GPU-1") == [1] and seen("1,7,0") == [1]
    told = report(asked(), FakeNvml(gpus=3), {"CUDA_VISIBLE_DEVICES": "2"})
    assert told.device == "cuda:2"


def test_the_machine_alone() -> None:
    told = report(None)
    assert told.model is None and told.devices.gpus and told.host == HOST


def test_it_is_told_in_words() -> None:
    lines = summary(report(asked()))
    assert lines[0] == "GPU 0: NVIDIA H200, 130.0 GiB free of 140.0 GiB"
    assert "27.5 GiB of weights; room for about" in lines[1] and "1,024 + 128" in lines[1]
    fake = FakeNvml()
    fake.used = 120 * GIB
    assert "it does not fit" in summary(report(asked(), fake))[1]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    show(report(asked(), FakeNvml(gpus=2)), console)
    text = console.export_text()
    for part in ("NVIDIA H200", "3 of 4", "512 / 700 W", "14.77 billion", "2,048", "most tokens/s"):
        assert part in text, part


def strict(schema: Any) -> Any:
    """The schema, where objects may have nothing beyond what it names."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {name: strict(value) for name, value in schema.items()} | closed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Capacity", asdict(CAPACITY)), ("Capacity", asdict(report(asked(), FakeNvml(2)))),
        ("Capacity", asdict(report(None))), ("Live", asdict(LIVE)), ("Timeline", TIMELINE),
    ],
)  # fmt: skip
def test_every_field_is_in_the_document(name: str, value: Any) -> None:
    schemas = strict(INSIGHT)
    document = {**schemas[name], "components": {"schemas": schemas}}
    jsonschema.validate(json.loads(json.dumps(value)), document)


# The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def test_the_command_tells_programs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    fake = FakeNvml()
    monkeypatch.setattr(command, "Nvml", lambda: Nvml(fake))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = CliRunner().invoke(command.capacity, ["--model", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["split"]["kv_tokens"] > 500_000 and told["model"]["dtype"] == "bfloat16"
    assert not fake.is_open
    fake.used = 139 * GIB
    result = CliRunner().invoke(command.capacity, ["--model", str(folder)])
    assert result.exit_code == 1 and "no: " in result.output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "/nowhere/at/all"], "it must be a folder or a name"),
        (["--tp", "0"], "tp is 0; it must be at least 1"),
        (["--page-size", "0"], "page_size is 0"),
        (["--max-model-len", "50000"], "the checkpoint's context is 40960"),
    ],
)
def test_wrong_flags_are_told(folder: Path, flags: list[str], told: str) -> None:
    result = CliRunner().invoke(command.capacity, ["--model", str(folder), *flags])
    assert result.exit_code == 2 and told in result.output


def test_the_machines_files(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "meminfo", tmp_path / "cpuinfo"
    memory.write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   400 kB\n")
    told = read_host(memory)
    assert (told.memory_total_bytes, told.memory_available_bytes) == (1_024_000, 409_600)
    assert read_host(tmp_path / "none").memory_total_bytes is None
    cpu.write_text("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 x\n")
    assert multiplies_bfloat16(cpu) and not multiplies_bfloat16(tmp_path / "none")
    cpu.write_text("flags : fpu avx2\n")
    assert not multiplies_bfloat16(cpu)
