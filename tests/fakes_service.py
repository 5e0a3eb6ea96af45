"""A `Service` that answers from a script, with gates that a test opens. Knows no threads."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from engine.request import Delta, Finish, Prompt
from httpd.service import Job, ModelCard, Occupancy, Rejected, State

CARD = ModelCard(
    id="org/tiny-model", created=1_700_000_000, max_model_len=64, vocab_size=100,
    has_chat_template=True,
)  # fmt: skip


def delta(
    text: str = "", finish: Finish = Finish.NONE, *, tokens: int = 0, **more: object
) -> Delta:
    """A delta whose token count stands for itself."""
    made = Delta(
        request_id=1, text=text, token_ids=(), finish=finish, completion_tokens=tokens,
        cached_tokens=2,
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


HELLO = (
    delta("Hel", tokens=1),
    delta("", tokens=2),  # held back
    delta("lo", tokens=3),
    delta("!", Finish.STOP, tokens=4),
)


# An event is waited for: what comes after it comes once it is set.
Script = Sequence[Delta | Exception | asyncio.Event]


class FakeGeneration:
    """Plays its deltas. Owned by the test's loop."""

    def __init__(self, script: Script, gate: asyncio.Event) -> None:
        self.prompt_tokens = 5
        self.aborts = 0
        self.ended = False
        self.end_wanted = False
        self.waiting = asyncio.Event()  # set while it waits at the gate
        self._script = script
        self._gate = gate

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for item in self._script:
            self.waiting.set()
            await self._gate.wait()
            if self.end_wanted:
                item = delta(finish=Finish.ABORT)
            if isinstance(item, asyncio.Event):
                await item.wait()
                continue
            if isinstance(item, Exception):
                raise item
            self.ended = item.finish is not Finish.NONE
            yield item

    def end(self) -> None:
        self.end_wanted = True

    def abort(self) -> None:
        if not self.ended:
            self.aborts += 1


class FakeService:
    """Records what is submitted and plays `script` for each. Owned by the test's loop."""

    def __init__(self, script: Script = HELLO) -> None:
        self.script = script
        self.current_state = State.READY
        self.card = CARD
        self.refusal: Exception | None = None
        self.submissions: list[Job] = []
        self.prompts: list[Prompt] = []  # tokenized only
        self.generations: list[FakeGeneration] = []
        self.cancelled_submits = 0
        self.submitting = asyncio.Event()  # set while submit waits
        self.accept = asyncio.Event()  # lets submit return
        self.produce = asyncio.Event()  # lets deltas out
        self.accept.set()
        self.produce.set()

    def state(self) -> State:
        return self.current_state

    def gil_enabled(self) -> bool:
        return False

    def occupancy(self) -> Occupancy | None:
        if self.current_state is State.LOADING:
            return None
        return Occupancy(
            requests=len(self.generations), running=0, waiting=0, available_pages=8, total_pages=8
        )

    def model(self) -> ModelCard:
        assert self.current_state is State.READY
        return self.card

    async def submit(self, job: Job) -> list[FakeGeneration]:
        self.submissions.append(job)
        self.submitting.set()
        try:
            await self.accept.wait()
        except asyncio.CancelledError:
            self.cancelled_submits += 1
            raise
        if self.refusal is not None:
            raise self.refusal
        generations = [FakeGeneration(self.script, self.produce) for _ in job.params]
        self.generations += generations
        return generations

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        self.prompts.append(prompt)
        await self.accept.wait()
        if self.refusal is not None:
            raise self.refusal
        return (7, 8, 9)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(f"[{token_id}]" for token_id in token_ids)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [f"t{token_id}" for token_id in token_ids]


def context_refusal() -> Rejected:
    """What the real service raises for a prompt that is too long."""
    return Rejected(
        400,
        "This model's maximum context length is 64 tokens; the prompt has 65.",
        param="messages",
        code="context_length_exceeded",
    )
