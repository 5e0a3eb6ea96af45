"""Where ranks of other machines find rank 0, and the secret by which they are let in.

Both go through the store that torchrun keeps on rank 0's machine anyway, for the time of the
meeting. That store asks nobody who they are, and listens on every address: whoever reaches it in
that time learns the secret. So the machines' network must be private; README.md says so.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from runtime.ranks.links import RanksError
from runtime.ranks.rank import Rank

SECRET_BYTES: Final = 32
_KEY: Final = "plait/rank 0"  # a store serves one job, whose rank 0 invites anew after a restart
_TIMEOUT: Final = timedelta(seconds=30)  # of each question to the store


@dataclass(frozen=True, slots=True)
class Invitation:
    """What rank 0 tells those that are to come. Raises ValueError for what is none."""

    host: str
    port: int
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES or not 0 < self.port < 1 << 16 or not self.host:
            raise ValueError("not an invitation")

    def encode(self) -> bytes:
        return json.dumps([self.host, self.port, self.secret.hex()]).encode()

    @classmethod
    def decode(cls, raw: bytes) -> "Invitation":
        try:
            host, port, secret = json.loads(raw)
            return cls(str(host), int(port), bytes.fromhex(secret))
        except (ValueError, TypeError) as error:
            raise ValueError(f"torchrun's store has no invitation, but {raw[:100]!r}") from error


class Invitations:
    """The place for the invitation in torchrun's store. Owned by the main thread."""

    def __init__(self, place: Rank) -> None:
        """Raises RanksError where the store cannot be reached."""
        assert place.store is not None
        self._host, self._port = place.store
        with self._asking():
            self._store = self._connect()

    def _connect(self) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # takes seconds

        return TCPStore(
            self._host, self._port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False
        )

    def invite(self, invitation: Invitation) -> None:
        """Raises RanksError where the store is gone; so do the others."""
        with self._asking():
            self._store.set(_KEY, invitation.encode())

    def withdraw(self) -> None:
        """Everybody is in: the secret opens nothing any more."""
        with self._asking():
            self._store.delete_key(_KEY)

    def try_read(self) -> Invitation | None:
        """None while rank 0 has not invited."""
        with self._asking():
            if not self._store.check([_KEY]):
                return None
            raw = self._store.get(_KEY)
        try:
            return Invitation.decode(raw)
        except ValueError as error:
            raise RanksError(str(error)) from error

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch raises for all that goes wrong there
            where = f"{self._host}:{self._port}"
            raise RanksError(f"torchrun's store at {where} cannot be used: {error}") from error
