"""The prefix cache's tier in host memory, case by case, and with a model that runs.

Random sequences are in test_host_tier_stateful.py and test_scheduler_stateful.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from engine.build import assemble_engine, build_engine
from engine.cache_factory import HostMemory, build_prefix_cache
from engine.config import EngineConfig
from engine.core import Engine
from engine.cuda_executor import CudaExecutor
from engine.descriptor import COPY_WORDS, PAGE_IN, PAGE_OUT, PageCopies
from engine.errors import ModelError
from engine.executor import Executor
from engine.host_pages import HostPages, copy_rows_at_once
from engine.kv_cache import KvCache, page_bytes
from engine.load import load_model
from engine.model_config import read_model_config
from engine.models.decoder import Decoder
from engine.pager import Pager
from engine.pages import PagePool
from engine.radix import RadixCache
from engine.request import Int32Array, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.streams import Event, Stream
from gpu_ops.plain_decode import PlainSampler
from gpu_ops.rows_copy import RowsCopy
from tests.checkpoints import VOCAB
from tests.fakes_executor import fake_engine
from tests.fakes_streams import HostEvent, HostStream, HostStreams

PAGE = 2
Write = Literal["through", "back"]


def tokens(text: str) -> Int32Array:
    """One token for each character."""
    return np.array([ord(character) for character in text], np.int32)


def pages(*ids: int) -> Int32Array:
    return np.array(ids, np.int32)


def cache_of(slots: int, write: Write = "back", copies_a_step: int = 100) -> RadixCache:
    """A cache with room for `slots` pages on the host."""
    host = HostMemory(1 + slots, write, copies_a_step)
    cache = build_prefix_cache("radix", PAGE, "lru", host)
    assert isinstance(cache, RadixCache)
    return cache


def taken(cache: RadixCache) -> tuple[list[tuple[int, int, int]], bool]:
    cache.check_integrity()
    copies = cache.take_copies()
    return [(kind, page, slot) for kind, page, slot in copies.words.tolist()], copies.first


def found(cache: RadixCache, text: str, namespace: str = "") -> tuple[list[int], int]:
    """The pages matched on the device, and how many more on the host."""
    match = cache.match(namespace, tokens(text))
    cache.check_integrity()
    return match.pages.tolist(), match.host_tokens // PAGE


def test_what_is_evicted_is_copied_and_comes_back() -> None:
    cache = cache_of(8)
    cache.insert("", tokens("aabbcc"), pages(10, 11, 12))
    assert taken(cache) == ([], False)
    assert cache.evict(2).tolist() == [11, 12]
    outs, first = taken(cache)
    assert [(kind, page) for kind, page, _ in outs] == [(PAGE_OUT, 11), (PAGE_OUT, 12)]
    assert first, "the pages are written by the same step"
    assert found(cache, "aabbccdd") == ([10], 2)
    assert cache.load("", tokens("aabbccdd"), 1, pages(20, 21)) == 2
    slots = [slot for _, _, slot in outs]
    assert taken(cache) == ([(PAGE_IN, 20, slots[0]), (PAGE_IN, 21, slots[1])], False)
    inserted = cache.insert("", tokens("aabbcc"), pages(10, 20, 21))
    assert inserted.existing_pages == 1 and inserted.pages.tolist() == [10, 20, 21]
    assert found(cache, "aabbcc") == ([10, 20, 21], 0)
    assert cache.host_counts.cached == 2
    assert sorted(cache.evict(3).tolist()) == [10, 20, 21]
    assert [page for _, page, _ in taken(cache)[0]] == [10], "the others are on the host already"


def test_write_through_copies_before_the_page_is_wanted() -> None:
    cache = cache_of(8, "through", copies_a_step=2)
    cache.insert("", tokens("aabbcc"), pages(10, 11, 12))
    (one, two), first = taken(cache)
    assert {one[1], two[1]} == {11, 12} and not first
    assert cache.evict(2).tolist() == [11, 12]
    assert [page for _, page, _ in taken(cache)[0]] == [10]
    assert taken(cache) == ([], False)
    assert found(cache, "aabbcc") == ([10], 2)


def test_write_through_takes_no_place_from_what_is_also_on_the_device() -> None:
    cache = cache_of(2, "through")
    cache.insert("", tokens("aabbcc"), pages(10, 11, 12))
    assert len(taken(cache)[0]) == 2
    assert taken(cache) == ([], False)
    cache.insert("", tokens("ddee"), pages(13, 14))
    assert taken(cache) == ([], False)
    assert sorted(cache.evict(5).tolist()) == [10, 11, 12, 13, 14]
    # The last to leave is the last that was used, and the first page before the second.
    assert found(cache, "ddee") == ([], 2) and found(cache, "aabbcc") == ([], 0)


def test_room_is_made_of_copies_first_and_then_of_the_oldest_ends() -> None:
    cache = cache_of(3)
    cache.insert("", tokens("aabb"), pages(10, 11))
    cache.insert("", tokens("cc"), pages(12))
    cache.evict(3)
    cache.insert("", tokens("aabb"), pages(20, 21))  # on both sides now
    cache.insert("", tokens("dd"), pages(13))
    match = cache.match("", tokens("aabb"))
    cache.lock(match.node)
    cache.evict(1)
    assert cache.host_counts.cached == 3
    assert found(cache, "dd") == ([], 1) and found(cache, "cc") == ([], 1)
    cache.insert("", tokens("eeff"), pages(14, 15))
    cache.evict(2)  # the other copy of "aabb" goes, and then "dd", which was not used since "cc"
    assert found(cache, "eeff") == ([], 2)
    assert found(cache, "cc") == ([], 1) and found(cache, "dd") == ([], 0)
    assert found(cache, "aabb") == ([20, 21], 0), "nothing of it is lost"


def test_a_host_that_is_smaller_than_what_leaves_keeps_the_beginning() -> None:
    cache = cache_of(1)
    cache.insert("", tokens("aabbcc"), pages(10, 11, 12))
    assert sorted(cache.evict(3).tolist()) == [10, 11, 12]
    assert found(cache, "aabbcc") == ([], 1)
    assert taken(cache)[0][-1][1] == 10


def test_what_is_dropped_while_it_is_being_loaded_is_not_loaded() -> None:
    cache = cache_of(2, copies_a_step=1)
    cache.insert("", tokens("aabb"), pages(10, 11))
    cache.evict(2)
    taken(cache)
    assert cache.load("", tokens("aabb"), 0, pages(20, 21)) == 1
    assert cache.copies_left == 0
    taken(cache)
    cache.insert("", tokens("ccdd"), pages(12, 13))
    cache.evict(2)
    assert cache.load("", tokens("aabb"), 1, pages(21)) == 0


def test_namespaces_and_clear_cover_both_tiers() -> None:
    cache = cache_of(8)
    cache.insert("one", tokens("aabb"), pages(10, 11))
    cache.evict(2)
    assert found(cache, "aabb", "two") == ([], 0) == found(cache, "aabb")
    assert found(cache, "aabb", "one") == ([], 2)
    cache.insert("one", tokens("aabbcc"), pages(20, 21, 22))
    cache.lock(cache.match("one", tokens("aa")).node)
    assert sorted(cache.clear().tolist()) == [21, 22]
    assert found(cache, "aabbcc", "one") == ([20], 0)
    assert cache.host_counts.cached == 0


# Copies


@pytest.fixture
def kv_cache(checkpoint: Callable[[str], Path]) -> KvCache:
    """Five pages of random keys and values."""
    config = read_model_config(checkpoint("qwen3"))
    cache = KvCache.allocate(config, 5, 4, torch.float32, "cpu")
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.rand(part.shape))
    return cache


def page_of(cache: KvCache, page: int) -> torch.Tensor:
    return torch.stack([part[page] for part in (*cache.keys, *cache.values)]).clone()


def test_a_page_goes_out_and_in_with_every_layer(kv_cache: KvCache) -> None:
    cache = kv_cache
    before = [page_of(cache, page) for page in range(5)]
    host = HostPages(cache, 3, copy_rows_at_once)
    host.copy(np.array([[PAGE_OUT, 1, 2], [PAGE_OUT, 4, 1], [PAGE_IN, 3, 2]], np.int32))
    after = [page_of(cache, page) for page in range(5)]
    assert torch.equal(after[3], before[1])
    assert all(torch.equal(after[page], before[page]) for page in (0, 1, 2, 4))
    assert host.memory[1].tobytes() == before[4].numpy().tobytes()


class LoggedStreams(HostStreams):
    """Notes what the streams do, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        streams = self

        class Logged(HostStream):
            def wait_event(self, event: Event) -> None:
                streams.log.append("forward waits" if self is streams.forward else "pages wait")

        super().__init__()
        self.forward, self.pages = Logged(), Logged()

    def event(self) -> Event:
        log = self.log

        class Logged(HostEvent):
            def record(self, stream: Stream) -> None:
                log.append("copied")

        return Logged()

    def copy_rows(self, copy: RowsCopy, stream: Stream) -> None:
        assert stream is self.pages
        self.log.append("copy")
        super().copy_rows(copy, stream)


def test_a_step_waits_for_earlier_copies_and_for_its_own_only_where_it_must(
    kv_cache: KvCache,
) -> None:
    streams = LoggedStreams()
    pager = Pager(streams, kv_cache, 3)
    one = np.array([[PAGE_OUT, 1, 1]], np.int32)
    none = np.empty((0, COPY_WORDS), np.int32)
    expected = [
        (PageCopies(none), []),
        (PageCopies(one), ["copy", "copied"]),
        (PageCopies(one), ["forward waits", "copy", "copied"]),
        (PageCopies(none), ["forward waits"]),
        (PageCopies(none), []),
        (PageCopies(one, first=True), ["copy", "copied", "forward waits"]),
        (PageCopies(none), []),
    ]
    for copies, log in expected:
        streams.log.clear()
        pager.copy_no_sync(copies)
        assert streams.log == log
    pager.close()


# With a model


def conversations(seed: int) -> list[list[list[int]]]:
    """Turns of each user: every one begins with all before it, and some users begin alike."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCAB, 12).tolist()
    return [
        [system + rng.integers(0, VOCAB, 9).tolist(), *(rng.integers(0, VOCAB, (2, 7)).tolist())]
        for _ in range(5)
    ]


def outputs(engine: Engine) -> list[list[int]]:
    """What the users' turns are answered with; all users speak at the same time."""
    users = conversations(seed=4)
    history: list[list[int]] = [[] for _ in users]
    said: list[list[int]] = []
    for turn in range(3):
        for user, turns in enumerate(users):
            history[user] += turns[turn]
            params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
            number = turn * len(users) + user
            engine.submit(Request(number, np.array(history[user], np.int32), params, seed=0))
            said.append([])
        while engine.has_work:
            output = engine.step()
            engine.check_integrity()
            if output is not None:
                for number, token in zip(output.request_ids, output.token_ids, strict=True):
                    said[int(number)].append(int(token))
                    history[int(number) % len(users)].append(int(token))
    return said


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["cpu", "cuda on a host"])
def test_tokens_are_those_of_a_pool_that_holds_everything(
    kind: str, page_size: int, write: Write, checkpoint: Callable[[str], Path]
) -> None:
    config, model = load_model(checkpoint("qwen3"), device="cpu", dtype="float32")
    size = page_bytes(config, page_size, model.dtype)

    def build(max_kv_tokens: int, host_pages: int) -> Engine:
        settings = EngineConfig(
            checkpoint("qwen3"), device="cpu", dtype="float32", page_size=page_size, max_running=3,
            max_model_len=80, prefill_budget=16, max_kv_tokens=max_kv_tokens, cpu_threads=1,
            host_cache_gib=host_pages * size / 2**30, host_cache_write=write, overlap=True,
        )  # fmt: skip
        if kind == "cpu":
            return assemble_engine(settings, model)
        return cuda_engine_on_host(settings, model, host_pages)

    engine = build(80, 400 // page_size)
    said = outputs(engine)
    counts = engine.stats().host
    assert counts.loaded > 0 and counts.written > 0
    assert said == outputs(build(2000, 0))


def cuda_engine_on_host(config: EngineConfig, model: Decoder, slots: int) -> Engine:
    """The CUDA executor, with a host's streams."""
    assert config.max_kv_tokens is not None and config.max_model_len is not None
    page_count = 1 + config.max_kv_tokens // config.page_size
    executor: Executor = CudaExecutor(
        model, pages=page_count, page_size=config.page_size, max_rows=config.max_running,
        max_pages_per_row=-(-config.max_model_len // config.page_size), host_slots=slots,
        streams=HostStreams(), sampler=PlainSampler(),
    )  # fmt: skip
    host = HostMemory(slots, config.host_cache_write, 3) if slots else None
    scheduler = Scheduler(
        pool=PagePool(page_count),
        cache=build_prefix_cache("radix", config.page_size, "lru", host),
        max_running=config.max_running,
        max_model_len=config.max_model_len,
        prefill_budget=config.prefill_budget,
        eos_ids=(),
        vocab_size=VOCAB,
    )
    return fake_engine(scheduler, executor, overlap=True)


# Settings


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"host_cache_gib": 60_000.0}, r"host_cache_gib is 60000\.0: .* GB of memory are free"),
        ({"host_cache_gib": 1e-7}, r"host_cache_gib is 1e-07; it must be at least"),
    ],
)
def test_a_host_cache_that_cannot_be(
    settings: dict[str, float], told: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ModelError, match=told):
        build_engine(EngineConfig(checkpoint("qwen3"), device="cpu", **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"host_cache_gib": -1}, "host_cache_gib is -1; it must be between 0 and"),
        ({"host_cache_gib": float("nan")}, "host_cache_gib is nan"),
        ({"host_cache_gib": 1, "cache": "naive"}, "cache is naive, which keeps nothing"),
        ({"host_cache_write": "around"}, "host_cache_write is 'around'"),
        ({"cache_eviction": "mru"}, "cache_eviction is 'mru'; it must be lru, lfu or fifo"),
    ],
)
def test_settings_that_are_wrong_anywhere(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig(Path("nowhere"), **settings)  # type: ignore[arg-type]
