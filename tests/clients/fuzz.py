"""Requests that schemathesis makes up from a server's own OpenAPI document.

    python -m venv FUZZ && FUZZ/bin/pip install schemathesis
    FUZZ/bin/python -m tests.clients.fuzz http://127.0.0.1:8000 --requests 10000

No answer may be a 5xx, and each must be as the document says. In an environment of its own:
schemathesis brings thirty packages. Ends with 1 where something is wrong, which is then on the
standard output; the counts are written to perf/results/schemathesis.json. A model of few layers and
a context of a hundred tokens does: what is tried is the API. The server must have no other clients:
one of the requests is /abort.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from perf.results import save

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
# Operations with a body, which has that many examples each; of others there are few to make.
OPERATIONS = 8


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=10_000, help="how many at least")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report, events = Path(folder) / "report.json", Path(folder) / "events.ndjson"
        command = [
            *(str(Path(sys.executable).with_name("st")), "run", f"{asked.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(-(-asked.requests // OPERATIONS)), "--seed", str(asked.seed)),
            *("--continue-on-failure", "--generation-database", "none", "--no-color"),
            *("--request-timeout", "300", "--report", "json,ndjson"),
            *("--report-json-path", str(report), "--report-ndjson-path", str(events)),
        ]
        exit_code = subprocess.run(command).returncode
        figures = figures_of(json.loads(report.read_text()), events)
    print(save("schemathesis", figures))
    is_clean = not exit_code and not figures["failures"] and not figures["errors"]
    return 0 if is_clean and figures["requests"] >= asked.requests else 1


def figures_of(report: dict[str, Any], events: Path) -> dict[str, Any]:
    """What goes into the results, of a run's report and of its events."""
    requests = Counter(answers(events))
    return {
        "schemathesis": version("schemathesis"),
        "checks": CHECKS,
        "seed": report["seed"],
        "requests": requests.total(),
        "failures": report["test_cases"]["with_failures"],
        "unique_failures": report["test_cases"]["unique_failures"],
        "errors": len(report["errors"]),
        "ended": report["stop_reason"],
        "running_s": round(report["running_time"], 1),
        "answers": by_operation(requests),
    }


def answers(events: Path) -> Iterator[tuple[str, str]]:
    """(operation, status) of each request of the run."""
    with events.open() as lines:
        for line in lines:
            finished = json.loads(line).get("ScenarioFinished")
            if finished is None:
                continue
            recorder = finished["recorder"]
            for interaction in recorder.get("interactions", {}).values():  # none where skipped
                response = interaction.get("response")
                status = "none" if response is None else str(response["status_code"])
                yield recorder["label"], status


def by_operation(requests: "Counter[tuple[str, str]]") -> dict[str, Any]:
    """How often each status came, by operation."""
    told: dict[str, dict[str, int]] = {}
    for (operation, status), count in sorted(requests.items()):
        told.setdefault(operation, {})[status] = count
    return told


if __name__ == "__main__":
    sys.exit(main())
