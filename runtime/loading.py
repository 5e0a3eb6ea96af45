"""Loads the real engine and its text; imported and called on the engine thread.

Importing this module brings torch along, which takes seconds: /health answers in that time.
"""

import logging
import time
from functools import partial

from engine.build import build_engine, build_executor
from engine.config import EngineConfig
from engine.core import Engine
from engine.detokenizer import Detokenizer
from engine.errors import ModelError
from engine.executor import Executor
from engine.generation_config import eos_ids
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.on_demand import GrammarsOnDemand
from engine.grammar.vocabulary import Vocabulary
from engine.request import Finish, Request, SamplingParams, TextPrompt
from engine.tokenizer import Tokenizer
from engine.weights import Progress as Weights
from httpd.parsing.formats import choose_formats
from httpd.service import ModelCard
from runtime.config import ServerConfig
from runtime.engine_thread import Loaded, Progress, ServedEngine
from runtime.gil import check_gil
from runtime.messages import ModelFacts
from runtime.profiling import profiled
from runtime.ranks.leader import RankZero
from runtime.ranks.network import interface_towards
from runtime.ranks.rank import Address, Rank

log = logging.getLogger(__name__)


def load_engine(
    config: ServerConfig, progress: Progress, ranks: RankZero | None = None
) -> tuple[ServedEngine, Loaded]:
    """The engine, warmed up, and what the other threads need of the model.

    ranks  the others that serve the model, of which this is the first; None: there are none

    Raises ModelError for a checkpoint or a setting that cannot be served.
    """
    progress("loading the tokenizer", None)
    try:
        tokenizer = Tokenizer.load(config.engine.model)
    except ValueError as error:
        raise ModelError(str(error)) from error

    def on_bytes(done: int, total: int) -> None:
        progress(f"loading weights ({total / 1e6:.0f} MB)", done / max(total, 1))

    engine = _build(config.engine, on_bytes, progress, ranks)
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
    told = ModelFacts(
        card, kv_tokens=facts.kv_tokens, device=facts.device, dtype=facts.dtype,
        rank_sums=facts.rank_sums,
    )  # fmt: skip
    grammars = GrammarsOnDemand(partial(_grammar_compiler, config, tokenizer, facts.vocab_size))
    loaded = Loaded(told, tokenizer, Detokenizer(tokenizer), grammars)
    if config.profile:
        return profiled(engine, config.profile, config.profile_dir), loaded
    return engine, loaded


def _build(
    config: EngineConfig, on_bytes: Weights, progress: Progress, ranks: RankZero | None
) -> Engine:
    if ranks is None:
        return build_engine(config, on_bytes)
    from engine.rank_group import device_of_rank, join_group  # torch.distributed: not for one

    progress(f"joining {ranks.size} ranks", None)
    own = device_of_rank(config, 0, ranks.local_size)
    address = ranks.listening.getsockname()[:2]
    interface = interface_towards(address[0])
    group = join_group(own, 0, ranks.size, address, interface, ranks.listening)
    return build_engine(own, on_bytes, group=group, others=ranks.steps)


def load_rank(config: EngineConfig, progress: Progress, place: Rank, store: Address) -> Executor:
    """What a rank above 0 runs; `load_engine` is called on rank 0 meanwhile.

    store  where rank 0's `RankZero.listening` is

    Raises ModelError as `load_engine` does.
    """
    from engine.rank_group import device_of_rank, join_group  # as above

    own = device_of_rank(config, place.local_rank, place.local_size)
    group = join_group(own, place.rank, place.size, store, interface_towards(store[0]), None)
    executor = build_executor(
        own, group, lambda done, total: progress("loading weights", done / max(total, 1))
    )
    warning = check_gil()
    if warning is not None:
        log.debug("%s", warning)  # rank 0 says it
    return executor


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
