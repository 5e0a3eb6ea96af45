"""A real server with far too little memory, whose answers must be those of one with plenty.

    python -m perf.pressure                        # a small random model, minutes on a CPU

Asks 500 questions with a KV pool that holds them all, and again with one of a few requests, with
priorities that take each other's places: there, requests are sent back to the queue all the time.
Then once more, while some clients leave in the middle.

All answers are greedy. Sums of floats depend on how rows are batched, in their last bits: where two
tokens are as good as each other to within TIE, either may come, and such an answer counts as a tie.

Passes where each other answer is the same, or as far as it was read its beginning; more than 100
requests were sent back in each round; nothing is held once all have gone; and the server ends with
exit code 0, which it does only after a check of its own books: every page has one owner, every row
one state.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any, Final

import click
import httpx

from client.events import EventReader, text_of
from client.target import Target, new_client
from perf.results import save
from perf.serving import Served, serving
from perf.soak import WrongAnswer, checkpoint, chunks_in

VOCAB: Final = 256
AT_ONCE: Final = 48
LEAVE: Final = 0.3  # of the clients, in the round in which some leave
RETRACTIONS: Final = 100  # more than so many in a round, or it was no pressure
REST_S: Final = 20.0
TIE: Final = 1e-4  # of log-probabilities: a hundred times what sums differ by, and seldom as near
COMMON: Final = "--page-size 8 --max-model-len 320 --cpu-threads 1 --prefill-budget 128"
PLENTY: Final = f"{COMMON} --max-running 48 --max-kv-tokens 16384"
LITTLE: Final = (
    f"{COMMON} --max-running 24 --max-kv-tokens 448 --schedule-policy priority "
    "--preemption-threshold 1"
)


@dataclass(frozen=True, slots=True)
class Round:
    """What came of all questions once."""

    answers: list[str]  # as far as each was read
    left: list[bool]
    retractions: int
    wall_s: float


def questions(model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of requests, some of which begin alike."""
    dice = random.Random(seed)
    stems = [[dice.randrange(VOCAB) for _ in range(dice.randint(10, 90))] for _ in range(8)]
    bodies = []
    for _ in range(count):
        tail = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))]
        bodies.append({
            "model": model, "prompt": dice.choice(stems) + tail, "stream": True,
            "max_tokens": dice.choice([8, 60, 150]), "priority": dice.randrange(5),
            "temperature": 0,
        })  # fmt: skip
    return bodies


async def ask(client: httpx.AsyncClient, body: dict[str, Any], events: int | None) -> str:
    """The answer's text; `events` is after how many of them the client leaves.

    Raises WrongAnswer for an error.
    """
    text, seen, reader = "", 0, EventReader()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise WrongAnswer(f"{response.status_code}: {(await response.aread()).decode()}")
        async for part in response.aiter_raw():
            for chunk in chunks_in(part, reader):
                if events is not None and seen >= events:
                    return text
                text += text_of(chunk)
                seen += 1
            if reader.is_done:
                return text
    raise WrongAnswer(f"the stream ended after {text!r}, without its end")


async def ask_all(served: Served, bodies: list[dict[str, Any]], leaving: float) -> Round:
    """All questions, AT_ONCE at a time, and then nothing is held.

    leaving  share of the clients that leave in the middle
    """
    dice, turn = random.Random(1), asyncio.Semaphore(AT_ONCE)
    events = [dice.randrange(12) if dice.random() < leaving else None for _ in bodies]
    async with new_client(Target(served.url, served.model)) as client:
        before, begun_s = await retractions_of(client), time.monotonic()

        async def one(body: dict[str, Any], patience: int | None) -> str:
            async with turn:
                return await ask(client, body, patience)

        answers = await asyncio.gather(*map(one, bodies, events))
        wall_s = time.monotonic() - begun_s
        await wait_rest(client)
        retractions = await retractions_of(client) - before
    return Round(answers, [patience is not None for patience in events], retractions, wall_s)


async def retractions_of(client: httpx.AsyncClient) -> int:
    told: int = (await client.get("/live")).json()["steps"]["retractions"]
    return told


async def wait_rest(client: httpx.AsyncClient) -> None:
    """Until no request, row or page is held. Raises WrongAnswer."""
    until_s = time.monotonic() + REST_S
    while True:
        told = (await client.get("/health")).json()["occupancy"]
        held = told["requests"] or told["running"] or told["waiting"]
        if not held and told["available_pages"] == told["total_pages"]:
            return
        if time.monotonic() > until_s:
            raise WrongAnswer(f"{REST_S:g} s after all have gone: {told}")
        await asyncio.sleep(0.1)


def differing(asked: Round, known: list[str]) -> list[int]:
    """The numbers of the answers that are not as they should be."""
    answers = enumerate(zip(asked.answers, asked.left, known, strict=True))
    return [
        number
        for number, (answer, left, right) in answers
        if not (answer == right or (left and right.startswith(answer)))
    ]


async def nearest_tie(served: Served, body: dict[str, Any]) -> float:
    """How near the two best tokens come to each other anywhere in the answer, at the nearest."""
    async with new_client(Target(served.url, served.model)) as client:
        asked = {**body, "stream": False, "logprobs": 2}
        told = (await client.post("/v1/completions", json=asked)).raise_for_status().json()
    tops = [sorted(each.values()) for each in told["choices"][0]["logprobs"]["top_logprobs"]]
    return min((top[-1] - top[-2] for top in tops if len(top) > 1), default=float("inf"))


@click.command()
@click.option("--requests", default=500, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(requests: int, seed: int) -> None:
    with checkpoint(None) as folder:
        with serving(["--model", str(folder), *PLENTY.split()]) as served:
            bodies = questions(served.model, requests, seed)
            known = asyncio.run(ask_all(served, bodies, 0.0))
        with serving(["--model", str(folder), *LITTLE.split()]) as served:
            rounds = {
                name: asyncio.run(ask_all(served, bodies, leaving))
                for name, leaving in (("all stay", 0.0), ("some leave", LEAVE))
            }
        unlike = {n for asked in rounds.values() for n in differing(asked, known.answers)}
        ties: dict[int, float] = {}
        if unlike:
            with serving(["--model", str(folder), *PLENTY.split()]) as served:
                ties = {n: asyncio.run(nearest_tie(served, bodies[n])) for n in sorted(unlike)}
    figures: dict[str, Any] = {
        "requests": requests, "seed": seed, "plenty": PLENTY, "little": LITTLE,
        "plenty_retractions": known.retractions, "exit_code": 0,  # else `serving` has raised
    }  # fmt: skip
    passed = known.retractions == 0
    for name, asked in rounds.items():
        wrong = [n for n in differing(asked, known.answers) if ties[n] > TIE]
        passed &= not wrong and asked.retractions > RETRACTIONS
        figures[name] = {
            "answers": requests, "left": sum(asked.left), "wrong": len(wrong),
            "ties": len(differing(asked, known.answers)) - len(wrong),
            "retractions": asked.retractions, "wall_s": asked.wall_s,
        }  # fmt: skip
    figures["nearest_ties_where_answers_differ"] = ties
    figures["passed"] = passed
    print(json.dumps(figures, indent=1))
    print(save("pressure", figures))
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
