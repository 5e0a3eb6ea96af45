import itertools
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from runtime.channel import Channel, Receiver, Sender
from runtime.inbox import Inbox, Wakeup
from tests.fakes_channel import ScheduledCells

ITEMS = 200_000


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    made = Wakeup()
    yield made
    made.close()


def run_threads(*bodies: Callable[[], None]) -> None:
    """Runs the bodies at once, each in a thread named for it; raises what one of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(bodies))

    def guarded(body: Callable[[], None]) -> None:
        try:
            start.wait(10)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(b,), name=b.__name__) for b in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} did not end"
    if errors:
        raise errors[0]


def is_signalled(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup], [], [], 0)[0])


@pytest.mark.parametrize(("capacity", "slots"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_capacity_is_rounded_up_and_a_full_ring_refuses(
    wakeup: Wakeup, capacity: int, slots: int
) -> None:
    ring = Channel[int](capacity, wakeup)
    assert [ring.sender.try_push(n) for n in range(slots + 2)] == [True] * slots + [False] * 2
    assert ring.receiver.pop_all() == list(range(slots))
    assert ring.sender.try_push(7) and ring.receiver.try_pop() == 7


def test_capacity_below_one_is_refused(wakeup: Wakeup) -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        Channel[int](0, wakeup)


def test_order_over_many_rounds(wakeup: Wakeup) -> None:
    ring = Channel[int](4, wakeup)
    sent, got = itertools.count(), []
    for round_ in range(100):
        for _ in range(round_ % 5):
            ring.sender.try_push(next(sent)) or pytest.fail("not full, but refused")
        if round_ % 3:
            got += ring.receiver.pop_all()
        else:
            while (item := ring.receiver.try_pop()) is not None:
                got.append(item)
        assert ring.receiver.is_empty and ring.receiver.try_pop() is None
    assert got == list(range(ring.sender.pushed)) and len(got) > 100


def test_false_and_zero_are_items(wakeup: Wakeup) -> None:
    ring = Channel[object](4, wakeup)
    for item in (0, False, "", ()):
        assert ring.sender.try_push(item)
    assert ring.receiver.pop_all() == [0, False, "", ()]


def test_the_ring_keeps_nothing_it_gave(wakeup: Wakeup) -> None:
    cells: list[object] = [None] * 4 + [False]
    sender, receiver = Sender[object](cells, wakeup), Receiver[object](cells)
    for item in "abcdef":
        sender.try_push(item)
        receiver.try_pop()
    sender.try_push("g")
    receiver.pop_all()
    assert cells == [None] * 4 + [False]


def test_pop_all_stops_after_one_round(wakeup: Wakeup) -> None:
    """A sender that refills each slot at once must not keep the receiver in the loop."""

    class Refilled(list[object]):
        def __setitem__(self, at: object, value: object) -> None:
            super().__setitem__(at, 1 if value is None else value)  # type: ignore[index]

    cells = Refilled([1, 1, False])
    assert Receiver[int](cells).pop_all() == [1, 1]


def test_push_wait_gives_up_in_time_and_keeps_the_ring(wakeup: Wakeup) -> None:
    ring = Channel[str](1, wakeup)
    assert ring.sender.push_wait("a", 0.0)
    assert not ring.sender.push_wait("b", 0.002)
    assert ring.receiver.pop_all() == ["a"]


def test_push_wait_goes_on_when_there_is_room(wakeup: Wakeup) -> None:
    ring = Channel[str](1, wakeup)
    pauses: list[float] = []

    def pop_after_three_pauses(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            ring.receiver.try_pop()

    ring.sender.sleep = pop_after_three_pauses
    ring.sender.try_push("a")
    assert ring.sender.push_wait("b", 10)
    assert ring.receiver.try_pop() == "b"
    assert pauses == sorted(pauses) and len(pauses) == 3


def test_no_signal_while_the_receiver_is_awake(wakeup: Wakeup) -> None:
    ring = Channel[int](4, wakeup)
    ring.sender.try_push(1)
    assert not is_signalled(wakeup)
    ring.receiver.mark_asleep(True)
    ring.sender.try_push(2)
    assert is_signalled(wakeup)


# Sender: read slot, write slot, read mark. Receiver: write mark, read slot.
SCHEDULES = sorted(set(itertools.permutations(["push"] * 3 + ["sleep"] * 2)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids="-".join)
def test_no_order_of_steps_loses_a_wakeup(wakeup: Wakeup, schedule: tuple[str, ...]) -> None:
    cells = ScheduledCells([None, None, False])
    sender, receiver = Sender[int](cells, wakeup), Receiver[int](cells)
    found = []

    def push() -> None:
        assert sender.try_push(1)

    def sleep() -> None:
        receiver.mark_asleep(True)
        found.append(not receiver.is_empty)

    cells.schedule = list(schedule)
    run_threads(push, sleep)
    assert found[0] or is_signalled(wakeup), "the receiver sleeps and nobody will wake it"


@pytest.mark.parametrize("capacity", [1, 2, 64, 1024])
def test_stress_one_sender_one_receiver(wakeup: Wakeup, capacity: int) -> None:
    items = ITEMS if capacity > 2 else ITEMS // 20
    ring = Channel[int](capacity, wakeup)
    inbox = Inbox(wakeup, [ring.receiver])
    got: list[int] = []

    def send() -> None:
        for n in range(items):
            assert ring.sender.push_wait(n, 30)

    def receive() -> None:
        while len(got) < items:
            got.extend(ring.receiver.pop_all())
            if ring.receiver.is_empty and len(got) < items:
                began = time.monotonic()
                inbox.wait(10)
                assert time.monotonic() - began < 5, "slept through a push"

    run_threads(send, receive)
    assert got == list(range(items))


def test_stress_several_rings_one_receiver(wakeup: Wakeup) -> None:
    """Each sender waits for its own item to come back, so the receiver sleeps all the time."""
    rings = [Channel[int](4, wakeup) for _ in range(3)]
    inbox = Inbox(wakeup, [ring.receiver for ring in rings])
    echoes = [Channel[int](4, Wakeup()) for _ in rings]
    rounds = 1500

    def sender(index: int) -> Callable[[], None]:
        def send() -> None:
            mine = Inbox(echoes[index].sender._wakeup, [echoes[index].receiver])
            for n in range(rounds):
                assert rings[index].sender.try_push(n)
                while (echo := echoes[index].receiver.try_pop()) is None:
                    mine.wait(30)
                assert echo == n

        return send

    def receive() -> None:
        left = rounds * len(rings)
        while left:
            inbox.wait(30)
            for ring, echo in zip(rings, echoes, strict=True):
                for item in ring.receiver.pop_all():
                    assert echo.sender.try_push(item)
                    left -= 1

    run_threads(*(sender(index) for index in range(len(rings))), receive)
    for echo in echoes:
        echo.sender._wakeup.close()
