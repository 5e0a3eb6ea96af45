"""The OpenAPI document's schemas of what an operator looks at: capacity, live figures, timelines.

The values are made by `runtime`: runtime/capacity/report.py and runtime/live.py say what each field
means. A test holds both against each other.
"""

from typing import Final

from httpd.openapi_schemas import BOOLEAN, COUNT, STRING, Schema, array, one, or_null, record, ref

NUMBER: Final[Schema] = {"type": "number"}
WHOLE: Final[Schema] = {"type": "integer"}
MAYBE_NUMBER: Final = or_null(NUMBER)
MAYBE_COUNT: Final = or_null(COUNT)
MAYBE_STRING: Final = or_null(STRING)


def _all(schema: Schema, *names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, schema)


_GPU_MEMORY: Final = record(
    {
        **_all(COUNT, "total_bytes", "used_bytes", "free_bytes"),
        "reserved_bytes": MAYBE_COUNT,
    }
)
_SPLIT: Final = record(
    {
        **_all(COUNT, "ranks", "weight_bytes", "kv_bytes_per_token", "context_bytes"),
        **_all(COUNT, "workspace_bytes", "graph_bytes", "kv_bytes", "kv_tokens"),
        **_all(BOOLEAN, "available", "fits"),
        "why_not": MAYBE_STRING,
    }
)
_TIER: Final = record(
    _all(COUNT, "total_tokens", "used_tokens", "cached_tokens", "free_tokens"),
)

# Names of schemas -> schemas
INSIGHT: Final[dict[str, Schema]] = {
    "PrometheusText": STRING,
    "Gpu": record(
        {
            "index": COUNT,
            **_all(MAYBE_STRING, "name", "uuid"),
            "compute_capability": or_null(array(COUNT, minItems=2, maxItems=2)),
            "activity": record(
                {
                    "memory": or_null(_GPU_MEMORY),
                    **_all(MAYBE_COUNT, "sm_mhz", "memory_mhz"),
                    **_all(MAYBE_NUMBER, "power_w", "power_limit_w", "busy_share"),
                    "temperature_c": or_null(WHOLE),
                    "throttled_by": or_null(array(STRING)),
                    "ecc": or_null(
                        record(
                            {
                                "enabled": BOOLEAN,
                                **_all(MAYBE_COUNT, "corrected", "uncorrected"),
                            }
                        )
                    ),
                }
            ),
            **_all(MAYBE_COUNT, "max_sm_mhz", "max_memory_mhz"),
            "pcie": record(_all(MAYBE_COUNT, "generation", "width", "max_generation", "max_width")),
            "nvlink": or_null(record(_all(COUNT, "active", "present"))),
            "mig": or_null(record({"enabled": BOOLEAN, "instances": array(_GPU_MEMORY)})),
            "processes": or_null(
                array(
                    record(
                        {
                            "pid": COUNT,
                            **_all(MAYBE_STRING, "name", "user"),
                            "used_bytes": MAYBE_COUNT,
                            "is_ours": BOOLEAN,
                        }
                    )
                )
            ),
            "peak": record({**_all(MAYBE_NUMBER, "bytes_per_s", "bf16_flops"), "source": STRING}),
            "faults": array(record(_all(STRING, "what", "why"))),
        }
    ),
    "Capacity": record(
        {
            "at_s": NUMBER,
            "host": record(
                {
                    "cpus": COUNT,
                    **_all(MAYBE_COUNT, "memory_total_bytes", "memory_available_bytes"),
                }
            ),
            "devices": record(
                {"gpus": array(ref("Gpu")), **_all(MAYBE_STRING, "driver", "cuda", "absent")}
            ),
            "model": or_null(
                record(
                    {
                        **_all(STRING, "name", "architecture", "dtype"),
                        **_all(COUNT, "parameters", "active_parameters", "context_tokens"),
                        **_all(COUNT, "weight_bytes", "kv_bytes_per_token"),
                    }
                )
            ),
            "device": MAYBE_STRING,
            "ranks": COUNT,
            "split": or_null(_SPLIT),
            "splits": array(_SPLIT),
            "concurrency": array(
                record(
                    {
                        **_all(COUNT, "prompt_tokens", "output_tokens", "requests"),
                        "limited_by": one("memory", "max_running", "context"),
                    }
                )
            ),
            "decode": array(
                record(
                    {
                        **_all(COUNT, "batch", "context", "bytes", "flops"),
                        **_all(MAYBE_NUMBER, "bandwidth_s", "compute_s", "floor_s"),
                        "tokens_per_s": MAYBE_NUMBER,
                    }
                )
            ),
            "measured_kv_tokens": MAYBE_COUNT,
            "notes": array(STRING),
        }
    ),
    "Quantiles": record({"count": COUNT, **_all(MAYBE_NUMBER, "p50", "p90", "p99", "max")}),
    "Live": record(
        {
            **_all(NUMBER, "at_s", "uptime_s", "window_s"),
            "state": one("loading", "ready", "draining", "failed"),
            "version": STRING,
            "gil_enabled": BOOLEAN,
            "model": MAYBE_STRING,
            "throughput": record(
                _all(NUMBER, "requests", "prompt_tokens", "cached_tokens", "output_tokens")
            ),
            "latency": record(_all(ref("Quantiles"), "ttft", "itl", "queue", "e2e")),
            "load": record(
                {
                    **_all(COUNT, "alive", "encoding", "waiting", "running", "max_running"),
                    **_all(COUNT, "max_alive", "waiting_tokens"),
                    "start_estimate_s": MAYBE_NUMBER,
                }
            ),
            "kv": or_null(_TIER),
            "host_kv": or_null(_TIER),
            "steps": or_null(
                record(
                    {
                        **_all(COUNT, "steps", "retractions"),
                        "step_s": ref("Quantiles"),
                        **_all(MAYBE_NUMBER, "host_s", "idle_share"),
                    }
                )
            ),
            "gpus": array(ref("Gpu")),
            "memory_available_bytes": MAYBE_COUNT,
            "warnings": array(record({**_all(STRING, "code", "message"), "since_s": NUMBER})),
            "requests": array(
                record(
                    {
                        **_all(MAYBE_STRING, "id", "request_id"),
                        "phase": one("encoding", "waiting", "prefill", "decode"),
                        "age_s": NUMBER,
                        "prompt_tokens": MAYBE_COUNT,
                        **_all(COUNT, "cached_tokens", "output_tokens", "max_output_tokens"),
                    }
                )
            ),
        }
    ),
    "Timeline": record(
        {
            **_all(MAYBE_STRING, "request_id", "response_id"),
            "path": STRING,
            "received_s": NUMBER,
            "status": MAYBE_COUNT,
            "ended_s": MAYBE_NUMBER,
            "error": MAYBE_STRING,
            "parts": array(
                record(
                    {
                        "number": COUNT,
                        "finish": MAYBE_STRING,
                        "prompt_tokens": MAYBE_COUNT,
                        **_all(COUNT, "cached_tokens", "output_tokens"),
                        "submitted_s": NUMBER,
                        **_all(MAYBE_NUMBER, "encoded_s", "queued_s", "begun_s"),
                        **_all(MAYBE_NUMBER, "first_token_s", "last_token_s", "sent_s"),
                    }
                )
            ),
        }
    ),
}
