"""Loads the real engine and its text; imported and called on the engine thread.

Importing this module brings torch along, which takes seconds: /health answers in that time.
"""

import logging
import time
from functools import partial

from engine.build import build_engine
from engine.core import Engine
from engine.detokenizer import Detokenizer
from engine.errors import ModelError
from engine.generation_config import eos_ids
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.on_demand import GrammarsOnDemand
from engine.grammar.vocabulary import Vocabulary
from engine.request import Finish, Request, SamplingParams, TextPrompt
from engine.tokenizer import Tokenizer
from httpd.parsing.formats import choose_formats
from httpd.service import ModelCard
from runtime.config import ServerConfig
from runtime.engine_thread import Loaded, Progress
from runtime.gil import check_gil
from runtime.messages import ModelFacts

log = logging.getLogger(__name__)


def load_engine(config: ServerConfig, progress: Progress) -> tuple[Engine, Loaded]:
    """The engine, warmed up, and what the other threads need of the model.

    Raises ModelError for a checkpoint or a setting that cannot be served.
    """
    progress("loading the tokenizer", None)
    try:
        tokenizer = Tokenizer.load(config.engine.model)
    except ValueError as error:
        raise ModelError(str(error)) from error

    def on_bytes(done: int, total: int) -> None:
        progress(f"loading weights ({total / 1e6:.0f} MB)", done / max(total, 1))

    engine = build_engine(config.engine, on_bytes)
    progress("warming up", None)
    _warm_up(engine, tokenizer)
    warning = check_gil()
    if warning is not None:
        log.warning("%s", warning)
    facts = engine.facts
    card = ModelCard(
        id=config.model_name,
        created=int(time.time()),
        max_model_len=facts.max_model_len,
        vocab_size=min(facts.vocab_size, tokenizer.vocab_size),
        has_chat_template=tokenizer.has_chat_template,
        formats=choose_formats(
            config.tool_call_parser, config.reasoning_parser, tokenizer.chat_template_source
        ),
    )
    told = ModelFacts(card, kv_tokens=facts.kv_tokens, device=facts.device, dtype=facts.dtype)
    grammars = GrammarsOnDemand(partial(_grammar_compiler, config, tokenizer, facts.vocab_size))
    return engine, Loaded(told, tokenizer, Detokenizer(tokenizer), grammars)


def _grammar_compiler(config: ServerConfig, tokenizer: Tokenizer, width: int) -> GrammarCompiler:
    eos = eos_ids(config.engine.model)
    return GrammarCompiler(Vocabulary(tokenizer.backend, width, eos))


def _warm_up(engine: Engine, tokenizer: Tokenizer) -> None:
    """One short request: the first of each kind of step pays for allocations and caches."""
    prompt_ids = tokenizer.encode_prompt(TextPrompt("warm"))
    tokens = min(2, engine.facts.max_model_len - len(prompt_ids))
    if tokens > 0:
        params = SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
        engine.submit(Request(0, prompt_ids, params, seed=0))
        while engine.has_work:
            output = engine.step()
            assert output is None or Finish.ERROR not in output.finishes
