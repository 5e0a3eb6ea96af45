"""A server's own times, from what it counts: vLLM's names, over all labels; else nothing."""

import httpx
import pytest

from client.bench.own_times import Totals, means_ms, read_totals, told
from client.target import Target

METRICS = """# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 3
vllm:time_to_first_token_seconds_sum{model_name="m"} 1.5
vllm:time_to_first_token_seconds_count{model_name="m"} 5
vllm:time_to_first_token_seconds_sum{model_name="n"} 0.5
vllm:time_to_first_token_seconds_count{model_name="n"} 3
vllm:inter_token_latency_seconds_sum 1e-1
vllm:inter_token_latency_seconds_count 10
"""


def totals_of(answer: httpx.Response, monkeypatch: pytest.MonkeyPatch) -> Totals:
    monkeypatch.setattr("client.target.httpx.get", lambda *_, **__: answer)
    return read_totals(Target("http://x", "m"))


def test_means_are_of_what_came_between(monkeypatch: pytest.MonkeyPatch) -> None:
    after = totals_of(httpx.Response(200, text=METRICS), monkeypatch)
    before: Totals = {key: value / 2 for key, value in after.items()}
    means = means_ms(before, after)
    assert means == pytest.approx({"ttft": 250.0, "itl": 10.0})
    assert told(means) == "the server's own means, ms: TTFT 250.0, ITL 10.0"
    assert means_ms({}, after) == pytest.approx(means) and means_ms(after, after) == {}


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="no"),
        httpx.Response(200, text="{}"),
        httpx.Response(200, text="vllm:time_to_first_token_seconds_sum oh"),
    ],
)
def test_who_tells_none_has_none(answer: httpx.Response, monkeypatch: pytest.MonkeyPatch) -> None:
    assert means_ms({}, totals_of(answer, monkeypatch)) == {}
