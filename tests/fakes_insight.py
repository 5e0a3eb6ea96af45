"""An `Insight` that tells of a made-up server: one H200 that two programs share."""

import dataclasses
from typing import Any

from runtime.capacity.gpu import (
    Ecc,
    Fault,
    Gpu,
    GpuActivity,
    GpuLink,
    GpuMemory,
    GpuProcess,
    Gpus,
    NvLinks,
    Peak,
)
from runtime.capacity.report import Capacity, Concurrency, DecodeFloor, Host, ModelSize, Split
from runtime.live import (
    Latency,
    Live,
    Load,
    Quantiles,
    RunningRequest,
    Steps,
    Throughput,
    Tier,
    Warned,
)

KNOWN_REQUEST = "req_known"
GIB = 1 << 30

H200 = Gpu(
    index=0, name="NVIDIA H200", uuid="GPU-0", compute_capability=(9, 0),
    activity=GpuActivity(
        GpuMemory(140 * GIB, 100 * GIB, 39 * GIB, GIB), 1980, 3201, 512.5, 700.0, 61, 0.97,
        ("software power cap",), Ecc(True, 0, 0),
    ),
    max_sm_mhz=1980, max_memory_mhz=3201, pcie=GpuLink(5, 16, 5, 16), nvlink=NvLinks(18, 18),
    mig=None,
    processes=(
        GpuProcess(1, "python", "plait", 90 * GIB, True),
        GpuProcess(2, None, None, None, False),
    ),
    peak=Peak(4.8e12, 989e12, "NVIDIA's data sheet"),
    faults=(Fault("memory temperature", "Not Supported"),),
)  # fmt: skip
SPLIT = Split(1, 16 * GIB, 147456, GIB, GIB, GIB, 100 * GIB, 728177, True, True, None)
CAPACITY = Capacity(
    at_s=1.8e9, host=Host(16, 128 * GIB, 100 * GIB), devices=Gpus((H200,), "580.1", "13.0"),
    model=ModelSize("m", "Qwen3ForCausalLM", "bfloat16", 8, 8, 40960, 16 * GIB, 147456),
    device="cuda", ranks=1, split=SPLIT, splits=(SPLIT,),
    concurrency=(Concurrency(128, 128, 256, "max_running"),),
    decode=(DecodeFloor(1, 1024, 16 * GIB, 10**10, 0.0034, 0.00001, 0.0034, 294.1),),
    measured_kv_tokens=728000, notes=("GPU 0 is used by another program, too: pid 2.",),
)  # fmt: skip
SOME = Quantiles(3, 0.1, 0.2, 0.3, 0.3)
LIVE = Live(
    at_s=1.8e9, uptime_s=77.0, state="ready", version="0", gil_enabled=False, model="m",
    window_s=10.0, throughput=Throughput(1.5, 100.0, 40.0, 2000.0),
    latency=Latency(SOME, SOME, SOME, Quantiles(0, None, None, None, None)),
    load=Load(4, 1, 1, 2, 256, 2304, 900, 0.5), kv=Tier(1000, 400, 300, 300), host_kv=None,
    steps=Steps(12345, SOME, 0.0002, 0, 0.001), gpus=(H200,), memory_available_bytes=GIB,
    warnings=(Warned("throttled", "GPU 0 is slowed down: software power cap.", 1.8e9),),
    requests=(
        RunningRequest("chatcmpl-1", "req_1", "decode", 2.5, 100, 64, 50, 200),
        RunningRequest(None, "req_2", "encoding", 0.1, None, 0, 0, 16),
    ),
)  # fmt: skip
TIMELINE: dict[str, Any] = {
    "request_id": KNOWN_REQUEST, "response_id": "chatcmpl-1", "path": "/v1/chat/completions",
    "received_s": 1.8e9, "status": 200, "ended_s": 3.0, "error": None,
    "parts": [
        {
            "number": 7, "finish": "stop", "prompt_tokens": 100, "cached_tokens": 64,
            "output_tokens": 50, "submitted_s": 0.001, "encoded_s": 0.002, "queued_s": 0.003,
            "begun_s": 0.004, "first_token_s": 0.1, "last_token_s": 2.9, "sent_s": 2.95,
        },
    ],
}  # fmt: skip


class FakeInsight:
    """Satisfies httpd.insight.Insight. Owned by the test's loop."""

    async def capacity(self) -> dict[str, Any]:
        return dataclasses.asdict(CAPACITY)

    def live(self) -> dict[str, Any]:
        return dataclasses.asdict(LIVE)

    async def metrics(self) -> bytes:
        return b"# HELP plait_up 1 while it serves.\n# TYPE plait_up gauge\nplait_up 1.0\n"

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        return TIMELINE if request_id == KNOWN_REQUEST else None
