"""What an output may not go on with, against a reference that looks at all of it each time."""

from hypothesis import given
from hypothesis import strategies as st

from engine.bad_words import BadWords

TOKENS = st.integers(0, 2)
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=6).map(tuple), max_size=6)


def reference(sequences: list[tuple[int, ...]], output: list[int]) -> set[int]:
    return {
        last
        for *before, last in sequences
        if before and output[len(output) - len(before) :] == before
    }


@given(SEQUENCES, st.lists(TOKENS, max_size=30))
def test_what_may_not_come_next(sequences: list[tuple[int, ...]], output: list[int]) -> None:
    bad = BadWords(sequences)
    assert bad.next_ids() == []
    for length, token_id in enumerate(output, 1):
        bad.take(token_id)
        assert set(bad.next_ids()) == reference(sequences, output[:length])


def test_sequences_of_one_token_are_no_matter_of_the_output() -> None:
    bad = BadWords([(5,)])
    bad.take(5)
    assert bad.next_ids() == []
