"""How whoever connects proves that it is of the job, and rank 0 that it is rank 0.

Rank 0 says 32 random bytes. The other says which link of which rank it is, 32 random bytes of its
own, and the HMAC-SHA256 of all that under the job's secret; rank 0 answers with another of the
same. All lengths are fixed, no byte is believed before its proof, and a proof is of no use on
another connection. What is said later is neither encrypted nor signed. Knows no sockets.
"""

import hmac
import secrets
import struct
from typing import Final

CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32
KINDS: Final = ("control", "steps")  # the two links of each rank
# Where the kernel says whose process is at the other end, the greeting needs no secret.
NO_SECRET: Final = b""

_WHO: Final = struct.Struct(f"!BB{CHALLENGE_BYTES}s")  # kind, rank, random bytes
HELLO_BYTES: Final = _WHO.size + PROOF_BYTES


class NoProof(Exception):
    """The other end does not belong to this job."""


def challenge() -> bytes:
    """What a connection begins with, from rank 0."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def hello(secret: bytes, challenged: bytes, kind: str, rank: int) -> bytes:
    """A rank's own words."""
    who = _WHO.pack(KINDS.index(kind), rank, challenge())
    return who + _proof(secret, b"Plait rank", challenged, who)


def check_hello(secret: bytes, challenged: bytes, said: bytes, size: int) -> tuple[str, int]:
    """Which link of which rank this is, in a group of `size`. Raises NoProof."""
    who, proof = said[: _WHO.size], said[_WHO.size :]
    if not hmac.compare_digest(proof, _proof(secret, b"Plait rank", challenged, who)):
        raise NoProof("does not know the job's secret")
    kind, rank, _ = _WHO.unpack(who)
    if kind >= len(KINDS) or not 1 <= rank < size:
        raise NoProof(f"is no rank of this job: {rank}, link {kind}")
    return KINDS[kind], rank


def answer(secret: bytes, challenged: bytes, said: bytes) -> bytes:
    """Rank 0's words to a hello that it has checked."""
    return _proof(secret, b"Plait answer", challenged, said[: _WHO.size])


def check_answer(secret: bytes, challenged: bytes, said: bytes, answered: bytes) -> None:
    """Raises NoProof where whoever listened is not rank 0.

    said  this rank's hello
    """
    if not hmac.compare_digest(answered, answer(secret, challenged, said)):
        raise NoProof("whoever listens there is not rank 0 of this job")


def _proof(secret: bytes, what: bytes, challenged: bytes, who: bytes) -> bytes:
    return hmac.digest(secret, what + challenged + who, "sha256")
