"""When grammars cannot be compiled at all: for ever, or not now."""

import errno
from typing import NoReturn

import pytest

from engine.errors import ModelError
from engine.grammar.on_demand import GrammarsOnDemand
from engine.grammar.spec import GrammarError, JsonObject


def too_many_files() -> OSError:
    return OSError(errno.EMFILE, "Too many open files")


def unread_file() -> ModelError:
    error = ModelError("config.json cannot be read")
    error.__cause__ = too_many_files()
    return error


class Making:
    """Counts how often a compiler was asked for. Owned by the test's thread."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.times = 0

    def __call__(self) -> NoReturn:
        self.times += 1
        raise self.error


@pytest.mark.parametrize("error", [too_many_files(), unread_file()], ids=["pipe", "file"])
def test_a_want_of_files_is_over_one_day(error: Exception) -> None:
    making = Making(error)
    grammars = GrammarsOnDemand(making)
    for times in (1, 2):
        with pytest.raises(GrammarError, match="try again") as refused:
            grammars.compile(JsonObject())
        assert refused.value.transient and making.times == times


def test_a_model_that_suits_no_grammars_is_asked_once() -> None:
    making = Making(ModelError("its tokens are no text"))
    grammars = GrammarsOnDemand(making)
    for _ in range(2):
        with pytest.raises(GrammarError, match="its tokens are no text") as refused:
            grammars.compile(JsonObject())
        assert not refused.value.transient and making.times == 1
