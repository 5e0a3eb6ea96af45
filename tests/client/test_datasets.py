"""Workloads: seeded, as long as asked for, and refused where a file is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from client.bench.arrivals import faster, poisson
from client.bench.datasets.files import agents, sharegpt, trace
from client.bench.datasets.prompts import PromptMaker
from client.bench.datasets.records import BadFile
from client.bench.datasets.synthetic import random_lengths, shared_prefix
from client.bench.options import Workload
from client.bench.workload import History, Sampling, Session, Turn

IDS, WORDS = PromptMaker(as_ids=True, vocab=200), PromptMaker(as_ids=False)


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


@pytest.mark.parametrize("maker", [IDS, WORDS], ids=["ids", "text"])
def test_a_seed_gives_one_workload(maker: PromptMaker) -> None:
    made = [random_lengths(maker, seed, 40, (1, 30), (2, 9)) for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]
    turns = [turn for session in made[0] for turn in session.turns]
    lengths = [
        len(turn.prompt.split() if isinstance(turn.prompt, str) else turn.prompt) for turn in turns
    ]
    assert len(turns) == 40 and 1 <= min(lengths) < max(lengths) <= 30
    assert {2, 9} <= {turn.output_tokens for turn in turns} <= set(range(2, 10))


def test_shared_prefixes() -> None:
    made = shared_prefix(IDS, 1, 50, (5, 5), (1, 1), prefix_tokens=16, groups=3)
    prompts = [session.turns[0].prompt for session in made]
    assert len({prompt[:16] for prompt in prompts}) == 3
    assert len(set(prompts)) == 50 and {len(prompt) for prompt in prompts} == {21}


def test_sharegpt(tmp_path: Path) -> None:
    asked = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}
    gpt_first = {"conversations": [{"from": "gpt", "value": "Hi."}]}
    openai = {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": ""}]}
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([asked, gpt_first, openai, {"conversations": []}]))
    made = sharegpt(path, 0, 3, len)
    assert made == [Session((Turn("Why?", 3),))] * 3


def test_sessions_of_agents(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"system": "s", "turns": [{"user": "a", "output_tokens": 5}, {"user": "b", "pause_s": 1}]},
        {"at_s": 2, "turns": [{"user": "c"}]},
    )
    first, second, again = agents(path, 3, 7)
    assert first == again == Session((Turn("a", 5), Turn("b", 7, 1.0)), None, "s")
    assert second == Session((Turn("c", 7),), 2.0)


def test_a_trace(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 4000, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]},
        {"timestamp": 9000, "input_length": 10, "output_length": 0},
    )
    made = faster(trace(path, 2, IDS), 2.0)
    assert [session.at_s for session in made] == [0.0, 1.5]
    early, late = (session.turns[0] for session in made)
    assert (len(early.prompt), len(late.prompt)) == (600, 700)
    assert early.prompt[:512] == late.prompt[:512] and early.prompt[512:] != late.prompt[512:600]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        ("agents", "", "no session"),
        ("agents", "{", "line 1: no JSON"),
        ("agents", '{"turns": []}', "at least one"),
        ("agents", '{"turns": [{"user": 5}]}', "'user' is 5"),
        ("agents", '{"turns": [{"user": "a", "pause_s": -1}]}', "at least 0"),
        ("trace", '{"timestamp": "x", "input_length": 1, "output_length": 1}', "'timestamp'"),
        ("trace", "[]", "no request"),
        ("sharegpt", "[[1]]", "record 1: not an object"),
        ("sharegpt", '[{"conversations": 1}]', "no list"),
        ("sharegpt", "[", "no JSON"),
        ("sharegpt", "[]", "no conversation"),
    ],
)
def test_wrong_files(tmp_path: Path, read: str, text: str, said: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    readers = {
        "agents": lambda: agents(path, 1, 1),
        "trace": lambda: trace(path, 1, IDS),
        "sharegpt": lambda: sharegpt(path, 0, 1, len),
    }
    with pytest.raises(BadFile, match=said):
        readers[read]()


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="cannot be read"):
        agents(tmp_path / "nothing", 1, 1)


def test_arrivals() -> None:
    sessions = random_lengths(IDS, 0, 2000, (1, 1), (1, 1))
    steady = [session.at_s or 0 for session in poisson(sessions, (5.0, 5.0), 1)]
    assert steady == sorted(steady) and steady[0] > 0
    assert steady[-1] == pytest.approx(400, rel=0.1)
    rising = [session.at_s or 0 for session in poisson(sessions, (1.0, 9.0), 1)]
    assert rising[999] > 1.5 * (rising[-1] - rising[999])
    with pytest.raises(ValueError, match="no time"):
        faster(sessions, 1.0)


def test_what_a_session_asks() -> None:
    turns = Turn("a", 3), Turn("b", 4)
    chat = History(Session(turns, system="s"), Sampling(chat=True), "m")
    chat.ask(turns[0])
    chat.take("said")
    path, body = chat.ask(turns[1])
    assert path == "/v1/chat/completions" and body["max_tokens"] == 4 and body["ignore_eos"]
    assert [message["content"] for message in body["messages"]] == ["s", "a", "said", "b"]
    text = History(Session(turns), Sampling(chat=False, ignore_eos=False), "m")
    text.ask(turns[0])
    text.take("said")
    path, body = text.ask(turns[1])
    assert (path, body["prompt"]) == ("/v1/completions", "asaidb") and "ignore_eos" not in body
    ids = History(Session(turns), Sampling(chat=True), "m")
    ids.ask(Turn((1, 2), 1))
    assert ids.ask(Turn((3,), 1))[1]["prompt"] == [1, 2, 3]


def test_a_trace_is_not_warmed_up_with_its_own_prompts(tmp_path: Path) -> None:
    """They would be in the server's cache when they count."""
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    path = write(tmp_path / "trace.jsonl", row, row)
    workload = Workload(
        "trace", path, 2, (64, 64), (32, 32), 512, 8, 1000, True, None, 2.0, seed=0
    )  # fmt: skip
    timed, first = workload.sessions(len), workload.warm_up(2).sessions(len)
    assert len(timed) == len(first) == 2 and all(session.at_s is None for session in first)
    assert {s.turns[0].prompt[:64] for s in timed}.isdisjoint(s.turns[0].prompt for s in first)
