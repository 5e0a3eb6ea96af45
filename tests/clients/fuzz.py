"""Requests that schemathesis makes up from a server's own OpenAPI document.

    ./plait serve --model FOLDER --max-model-len 64 --max-choices 2
    python -m venv FUZZ && FUZZ/bin/pip install schemathesis
    FUZZ/bin/python -m tests.clients.fuzz http://127.0.0.1:8000 --requests 10000

No answer may be a 5xx, and each must be as the document says. In an environment of its own:
schemathesis brings thirty packages. Ends with 1 where something is wrong, which is then on the
standard output; the counts are written to perf/results/schemathesis.json. A small model and short
answers do: what is tried is the API. The server must have no other clients: one of the requests is
/abort.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
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
# Operations with a body, which have that many examples each; of others there are few to make.
OPERATIONS = 8


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=10_000, help="how many at least")
    parser.add_argument("--examples", type=int, help="of an operation; else --requests over 8")
    parser.add_argument("--phases", default="examples,coverage,fuzzing")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    examples = asked.examples or -(-asked.requests // OPERATIONS)
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.ndjson"
        command = [
            *(str(Path(sys.executable).with_name("st")), "run", f"{asked.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--phases", asked.phases),
            *("--max-examples", str(examples), "--seed", str(asked.seed)),
            *("--continue-on-failure", "--generation-database", "none", "--no-color"),
            *("--request-timeout", "300", "--report", "ndjson"),
            *("--report-ndjson-path", str(events)),
        ]
        exit_code = subprocess.run(command).returncode
        figures = figures_of([events])
    print(save("schemathesis", figures))
    return 0 if exit_code == 0 and figures["requests"] >= asked.requests else 1


def figures_of(runs: Iterable[Path]) -> dict[str, Any]:
    """What goes into the results, of the events of one run or several."""
    answers: Counter[tuple[str, str]] = Counter()
    checks: Counter[tuple[str, str]] = Counter()
    for events in runs:
        for recorder in recorders(events):
            for interaction in recorder.get("interactions", {}).values():  # none where skipped
                response = interaction.get("response")
                status = "none" if response is None else str(response["status_code"])
                answers[recorder["label"], status] += 1
            for made in recorder.get("checks", {}).values():
                checks.update((check["name"], check["status"]) for check in made)
    return {
        "schemathesis": version("schemathesis"),
        "requests": answers.total(),
        "checks": table(checks),
        "answers": table(answers),
    }


def recorders(events: Path) -> Iterator[dict[str, Any]]:
    """What came of each operation in each phase of a run."""
    with events.open() as lines:
        for line in lines:
            finished = json.loads(line).get("ScenarioFinished")
            if finished is not None:
                yield finished["recorder"]


def table(counts: "Counter[tuple[str, str]]") -> dict[str, dict[str, int]]:
    """Counts by their first name, and then by their second."""
    told: dict[str, dict[str, int]] = {}
    for (first, second), count in sorted(counts.items()):
        told.setdefault(first, {})[second] = count
    return told


if __name__ == "__main__":
    sys.exit(main())
