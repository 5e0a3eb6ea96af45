import asyncio
import threading
import time

from runtime.channel import Channel
from runtime.inbox import Inbox, LoopInbox, Wakeup


def test_wait_returns_at_once_where_an_item_is_there() -> None:
    wakeup = Wakeup()
    ring = Channel[int](4, wakeup)
    inbox = Inbox(wakeup, [ring.receiver])
    ring.sender.try_push(1)
    started = time.monotonic()
    inbox.wait(30)
    inbox.wait(30, spin_s=1)
    assert time.monotonic() - started < 5
    wakeup.close()


def test_wait_ends_after_its_time() -> None:
    wakeup = Wakeup()
    inbox = Inbox(wakeup, [Channel[int](4, wakeup).receiver])
    inbox.wait(0.001, spin_s=0.001)
    assert inbox.is_empty
    wakeup.close()


def test_a_signal_before_the_sleep_is_not_lost_and_ends_one_sleep_only() -> None:
    wakeup = Wakeup()
    inbox = Inbox(wakeup, [])
    wakeup.signal()
    wakeup.signal()
    started = time.monotonic()
    inbox.wait(30)
    assert time.monotonic() - started < 5
    inbox.wait(0.01)
    assert time.monotonic() - started >= 0.01
    wakeup.close()


def test_a_push_wakes_a_sleeping_thread() -> None:
    wakeup = Wakeup()
    rings = [Channel[str](4, wakeup) for _ in range(2)]
    inbox = Inbox(wakeup, [ring.receiver for ring in rings])
    got: list[str] = []

    def receive() -> None:
        while len(got) < 2:
            inbox.wait(30)
            for ring in rings:
                got.extend(ring.receiver.pop_all())

    thread = threading.Thread(target=receive)
    thread.start()
    for ring, word in zip(rings, "ab", strict=True):
        assert ring.sender.try_push(word)
    thread.join(10)
    assert not thread.is_alive() and sorted(got) == ["a", "b"]
    wakeup.close()


def test_loop_inbox_gets_everything_and_shares_the_loop() -> None:
    wakeup = Wakeup()
    ring = Channel[int](8, wakeup)
    items = 20_000
    got: list[int] = []
    turns = 0

    async def main() -> None:
        nonlocal turns
        done = asyncio.Event()

        def empty() -> None:
            got.extend(ring.receiver.pop_all())
            if len(got) == items:
                done.set()

        inbox = LoopInbox(Inbox(wakeup, [ring.receiver]), empty)
        inbox.attach(asyncio.get_running_loop())
        sender.start()
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)
        inbox.detach()

    def send() -> None:
        for n in range(items):
            assert ring.sender.push_wait(n, 30)

    sender = threading.Thread(target=send)
    asyncio.run(asyncio.wait_for(main(), 30))
    sender.join(10)
    assert not sender.is_alive()
    assert got == list(range(items)) and turns > 10
    wakeup.close()


async def turns_of_the_loop() -> None:
    """Enough for whatever calls itself again, or listens, to be called."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_loop_inbox_sleeps_without_turning() -> None:
    """An idle loop must not be kept busy by its inbox."""
    wakeup = Wakeup()
    ring = Channel[int](8, wakeup)
    emptied = []

    async def main() -> None:
        inbox = LoopInbox(Inbox(wakeup, [ring.receiver]), lambda: emptied.append(1))
        inbox.attach(asyncio.get_running_loop())
        await turns_of_the_loop()
        inbox.detach()
        wakeup.signal()
        await turns_of_the_loop()

    asyncio.run(main())
    assert len(emptied) == 1
    wakeup.close()
