"""Grammars over a real vocabulary of 49,152 tokens."""

import json
from collections.abc import Iterator

import jsonschema
import pytest

from engine.generation_config import eos_ids
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import JsonSchema, Regex
from engine.grammar.vocabulary import Vocabulary
from engine.tokenizer import Tokenizer
from runtime.setup.model import default_folder
from tests.fakes_vocabularies import drawn

pytestmark = pytest.mark.model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "height_m": {"type": "number", "minimum": 0.3, "maximum": 2.8},
        "likes": {"type": "array", "items": {"enum": ["tea", "maths", "poetry"]}, "maxItems": 3},
    },
    "required": ["name", "born", "height_m", "likes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = default_folder()
    if not folder.is_dir():
        pytest.skip("the default model is not prepared: ./plait test prepares it")
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    ends = eos_ids(default_folder())
    compiler = GrammarCompiler(Vocabulary(tokenizer.backend, tokenizer.vocab_size, ends))
    yield compiler
    compiler.close()


def test_outputs_are_valid(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(JsonSchema(json.dumps(PERSON)))
    closing = [tokenizer.backend.token_to_id(text) for text in ('"', "}", "]", '"}', '",', ",")]
    ended = 0
    for seed in range(10):
        ids = drawn(grammar.matcher(), compiler.vocabulary, seed, closing)
        if ids is not None:
            ended += 1
            text = tokenizer.decode(ids, skip_special_tokens=False)
            jsonschema.validate(json.loads(text), PERSON)
    assert ended >= 3


def test_a_tokenized_text_follows_its_pattern(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile(Regex("The [a-z ]+ of [A-Z][a-z]+ is Paris\\.")).matcher()
    for each in (504, 3575, 282, 4649, 314, 7042, 30):
        assert matcher.accept(each)
    assert matcher.is_complete and matcher.is_terminated
