"""`python -m runtime.serve --model FOLDER` and `plait serve`: from flags to an exit code.

The one composition root. What is heavy (torch, and all that it brings along) is imported later, on
the engine thread: a wrong flag is answered at once, and /health within a second.
"""

import dataclasses
import faulthandler
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from engine.config import PREFILL_ATTENTIONS, SCHEDULE_POLICIES, EngineConfig
from engine.errors import ModelError
from engine.limits import check_settings
from engine.model_config import ModelConfig, read_model_config
from engine.sharding import share_of
from httpd.parsing.formats import REASONING_CHOICES, TOOLS_CHOICES
from runtime.address import address_of, allow_many_files, listen
from runtime.capacity.estimate import Asked
from runtime.capacity.host import multiplies_bfloat16
from runtime.checkpoint import find_checkpoint
from runtime.config import CACHE_ISOLATIONS, ServerConfig
from runtime.early import check_machine
from runtime.engine_thread import Load, Loaded, Progress, ServedEngine
from runtime.flags import option
from runtime.gil import restart_without_gil
from runtime.keys import ADMIN_KEYS, API_KEYS, take_keys
from runtime.logs import FORMATS, adopt_libraries, set_up_logging
from runtime.messages import ModelFacts
from runtime.monitor import all_stacks
from runtime.ranks.facts import Facts, facts_of
from runtime.ranks.follower import Follower, RankExecutor, meet_leader
from runtime.ranks.launch import removing_what_is_left, run_ranks
from runtime.ranks.leader import RankZero, gather_ranks
from runtime.ranks.links import RanksError
from runtime.ranks.rank import MOST_RANKS, Rank
from runtime.report import LoadingReport, show_capacity, show_ready, tell
from runtime.server import Server
from runtime.setup.console import SetupError
from runtime.telemetry.settings import (
    endpoint_of_environment,
    endpoint_of_flag,
    telemetry_to,
)
from runtime.version import plait_version

log = logging.getLogger(__name__)

_PATH: Final = click.Path(path_type=Path)


@click.command()
@click.option(
    "--model",
    help="A checkpoint's folder, or its name on the Hugging Face hub.  "
    "[default: SmolLM2-135M-Instruct, prepared on first use]",
)
@option("--served-model-name", "What clients call the model; without it, its folder's name.")
@option("--host", "Address to listen on.")
@option("--port", "Port to listen on; 0 for any that is free.", type=int)
@option("--device", "auto, cpu, cuda or cuda:N.")
@option("--dtype", "auto, float32, float16 or bfloat16.")
@option("--load-format", "auto, or dummy: random weights of the right shapes.")
@option("--page-size", "Tokens in a page of the KV cache.", type=int)
@option("--max-running", "Requests that are computed at the same time.", type=int)
@option("--max-model-len", "Prompt and output together, tokens; without it, the checkpoint's.",
        type=int)  # fmt: skip
@option("--prefill-budget", "Prompt tokens a step; 0 for whole prompts.", type=int)
@option("--target-itl-ms", "Time between tokens: no step carries more of prompts than fits into "
         "it; 0 for --prefill-budget alone.  [default: 40 on a GPU, 0 on a CPU]",
         type=float)  # fmt: skip
@option("--max-kv-tokens", "Size of the KV cache, tokens; without it, from --memory-fraction.",
        type=int)  # fmt: skip
@option("--memory-fraction", "Share of the memory left after loading that the KV cache takes.",
         type=float)  # fmt: skip
@option("--cache", "Prefix cache: radix, or naive to keep nothing.")
@option("--cache-eviction", "What the prefix cache gives up first: lru, lfu or fifo.",
        type=click.Choice(["lru", "lfu", "fifo"]))  # fmt: skip
@option("--host-cache-gib", "Memory for what the prefix cache has no room for on the device; "
        "0 for none.", type=float)  # fmt: skip
@option("--host-cache-write", "When it goes there: through, soon after it was computed, or back, "
        "when its place is wanted.", type=click.Choice(["through", "back"]))  # fmt: skip
@option("--schedule-policy", "Order in which waiting requests start.",
         type=click.Choice(SCHEDULE_POLICIES))  # fmt: skip
@option("--preemption-threshold", "With --schedule-policy priority: how many levels higher a "
         "waiting request must be to take a running one's place; without it, none does.",
        type=int)  # fmt: skip
@option("--overlap/--no-overlap", "Plan a step while one runs; without either, where it helps.",
         type=bool)  # fmt: skip
@click.option("--cuda-graph-max-bs", type=int,
              help="Decode steps of up to so many requests run as CUDA graphs; 1,024 are the most."
              "  [default: --max-running]")  # fmt: skip
@click.option("--no-cuda-graph", is_flag=True, help="Launch every decode step kernel by kernel.")
@option(
    "--prefill-attention",
    "Kernels for prompts on a GPU; auto: FlashInfer's FlashAttention 3 where flashinfer-python is "
    "installed and takes the model, else torch's.",
    type=click.Choice(PREFILL_ATTENTIONS),
)
@option("--cpu-threads", "torch's threads on a CPU; without it, one a core.", type=int)
@option("--seed", "Seed of dummy weights.", type=int)
@option(
    "--tool-call-parser",
    "How the model writes tool calls; auto: as its chat template says.",
    type=click.Choice(TOOLS_CHOICES),
)
@option("--reasoning-parser", "How the model writes reasoning; auto: as its chat template says.",
         type=click.Choice(REASONING_CHOICES))  # fmt: skip
@option("--http-loops", "Threads that serve connections, each its share of them.", type=int)
@option("--tokenizer-threads", "Threads that render templates and encode prompts.", type=int)
@option("--max-queued", "Requests beyond the running ones before clients get a 503.", type=int)
@option("--max-queued-tokens", "Prompt tokens of waiting requests before clients get a 503.",
        type=int)  # fmt: skip
@option("--max-choices", "Prompts times n of one request.", type=int)
@option("--max-body-bytes", "Largest request body.", type=int)
@option("--max-streams", "HTTP/2 streams on one connection.", type=int)
@click.option("--cors-origin", "cors_origins", multiple=True,
              help="Origin that browsers may call from; repeat for several.")  # fmt: skip
@option("--tls-cert", "PEM file: serve HTTPS, with HTTP/2 by ALPN.", type=_PATH)
@option("--tls-key", "PEM file of the certificate's key.", type=_PATH)
@click.option("--api-key-file", type=_PATH,
              help="File of API keys, one a line: all but /health, /ready and / needs one.  "
              "[more keys: environment variable PLAIT_API_KEYS]")  # fmt: skip
@click.option("--admin-key-file", type=_PATH,
              help="File of keys that also open /flush_cache, /abort, /debug/steps and "
              "/debug/stacks.  "
              "[more keys: environment variable PLAIT_ADMIN_KEYS]")  # fmt: skip
@option("--cache-isolation", "Who shares computed prompts: none keeps nobody apart, key each "
        "API key; a request's cache_salt does besides.",
        type=click.Choice(CACHE_ISOLATIONS))  # fmt: skip
@option("--page/--no-page", "The web page at /.")
@option("--access-log/--no-access-log", "A line for each request.")
@option("--log-format", "human, or json: an object a line.", type=click.Choice(FORMATS))
@option(
    "--otlp-endpoint",
    "Collector that gets OpenTelemetry spans of each request, over HTTP: "
    "http://collector:4318.  [default: environment variable OTEL_EXPORTER_OTLP_ENDPOINT]",
)
@option("--profile", "Trace the first so many steps with torch's profiler.", type=int)
@option("--profile-dir", "Where the trace goes.", type=_PATH)
@option("--request-timeout-s", "Time for one request, answer included; without it, no limit.",
         type=float)  # fmt: skip
@option("--trace-steps", "Of how many steps GET /debug/steps tells an admin why each was so; 0 "
        "for none.", type=int)  # fmt: skip
@option("--queue-timeout-s", "Age of a request that has not started, before it gets a 503; "
         "without it, no limit.", type=float)  # fmt: skip
@option("--running-timeout-s", "Likewise of one that has started, from its arrival.", type=float)
@option("--stall-timeout-s", "Time for a client to take what is sent, before it is cut.",
         type=float)  # fmt: skip
@option("--drain-timeout-s", "Time for running requests to end after SIGTERM.", type=float)
@option("--watchdog-s", "Silence of a thread after which the server ends itself.", type=float)
@click.option("--tp", type=click.IntRange(1, MOST_RANKS), default=None,
              help="Tensor parallelism: so many processes, on as many GPUs, share the model.  "
              "[default: as many as torchrun started, or one]")  # fmt: skip
def serve(model: str | None, tp: int | None, **flags: Any) -> None:
    """Serves a model over an OpenAI-compatible API, HTTP/1.1 and HTTP/2."""
    restart_without_gil()
    environ = dict(os.environ)  # keys are taken out of it
    try:
        rank = Rank.of_environment()
        config = build_config(find_checkpoint(model), flags)
        shape = _read_shape(config.engine.model)
        check_settings(config.engine, shape)
        share_of(shape, rank.rank, max(tp or 1, rank.size))
        _check_tp(tp, rank)
        check_machine(config.engine, max(tp or 1, rank.local_size))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except SetupError as error:
        raise click.ClickException(str(error)) from error
    if tp is not None and tp > 1 and rank.is_alone:
        sys.exit(run_ranks(tp, environ))
    asked = Asked(config.engine, shape, config.model_name, rank.size, multiplies_bfloat16())
    try:
        code, all_ended = _run_rank(config, rank, asked)
    except RanksError as error:
        raise click.ClickException(str(error)) from error
    logging.shutdown()
    if not all_ended:
        os._exit(code)  # a thread that hangs would hang the interpreter's own end too
    sys.exit(code)


def _check_tp(tp: int | None, rank: Rank) -> None:
    if tp is not None and not rank.is_alone and tp != rank.size:
        raise ValueError(f"tp is {tp}, but torchrun started {rank.size} processes")


def _run_rank(config: ServerConfig, rank: Rank, asked: Asked) -> tuple[int, bool]:
    """Serves, or does its part for rank 0, which does. Raises RanksError."""
    if rank.is_alone:
        return run(config, load_real(config), asked)
    facts = facts_of(config.engine)
    if rank.rank > 0:
        return _follow(config, rank, facts)
    with removing_what_is_left():
        ranks = gather_ranks(rank, facts)
        return run(config, load_real(config, ranks), asked, ranks)


def _follow(config: ServerConfig, rank: Rank, facts: Facts) -> tuple[int, bool]:
    set_up_logging(config.log_format, rank.rank)
    faulthandler.enable()
    link, steps, store = meet_leader(rank, facts)

    def load(progress: Progress) -> RankExecutor:
        from runtime.loading import load_rank  # as in `load_real`

        adopt_libraries()
        return load_rank(config.engine, progress, rank, store)

    outcome = Follower(link, steps, load, config.watchdog_s, is_near=rank.is_near).run()
    return outcome.exit_code, outcome.all_ended


def _read_shape(folder: Path) -> ModelConfig:
    """What config.json says, while a flag that does not fit it is still answered at once."""
    try:
        return read_model_config(folder)
    except ModelError as error:  # no flag's fault
        raise click.ClickException(f"the model cannot be loaded: {error}") from error


def build_config(model: Path, flags: dict[str, Any]) -> ServerConfig:
    """The settings for these flags. Raises ValueError naming field, value and limit."""
    engine_names = {field.name for field in dataclasses.fields(EngineConfig)}
    graphs = _graph_rows(flags.pop("cuda_graph_max_bs"), flags.pop("no_cuda_graph"), flags)
    engine = {name: value for name, value in flags.items() if name in engine_names}
    engine["prefill_budget"] = engine.get("prefill_budget") or None
    rest = {name: value for name, value in flags.items() if name not in engine_names}
    rest["api_keys"] = take_keys(rest.pop("api_key_file"), API_KEYS)
    rest["admin_keys"] = take_keys(rest.pop("admin_key_file"), ADMIN_KEYS)
    rest["otlp_endpoint"] = endpoint_of_flag(rest.pop("otlp_endpoint"))
    return ServerConfig(engine=EngineConfig(model=model, **engine, **graphs), **rest)


def _graph_rows(most: int | None, none: bool, flags: dict[str, Any]) -> dict[str, Any]:
    """What the two flags about CUDA graphs say, in the engine's words. Raises ValueError."""
    if most is None:
        return {"cuda_graph_max_rows": 0} if none else {}
    if none:
        raise ValueError(f"cuda_graph_max_bs is {most}, but no_cuda_graph is given, too")
    if not 1 <= most <= flags["max_running"]:
        raise ValueError(
            f"cuda_graph_max_bs is {most}; it must be between 1 and max_running, "
            f"{flags['max_running']}"
        )
    return {"cuda_graph_max_rows": most}


def run(
    config: ServerConfig, load: Load, asked: Asked | None = None, ranks: RankZero | None = None
) -> tuple[int, bool]:
    """Serves until the end; the exit code, and whether every thread has ended.

    asked  what the capacity report is about; None: the machine alone
    ranks  the others that serve the model; None: there are none
    """
    as_log = config.log_format == "json"
    set_up_logging(config.log_format)
    faulthandler.enable()
    allow_many_files()
    listening = listen(config)
    address = address_of(config, listening)
    traces_go_to = config.otlp_endpoint or endpoint_of_environment(os.environ)
    report = LoadingReport(as_log=as_log)

    def on_ready(facts: ModelFacts) -> None:
        report.finish()
        show_ready(config, facts, address)

    server = Server(
        config, listening, load, version=plait_version(), progress=report, on_ready=on_ready,
        capacity=asked, on_capacity=partial(show_capacity, as_log=as_log),
        followers=() if ranks is None else ranks.links,
        telemetry=telemetry_to(traces_go_to, config.http_loops),
    )  # fmt: skip

    def on_signal(number: int, _frame: FrameType | None) -> None:
        server.on_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGUSR1, _log_stacks)
    tell([f"loading {config.model_name}; {address}/health tells when it is ready"], as_log=as_log)
    outcome = server.run()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    report.finish()
    return outcome.exit_code, outcome.all_ended


def _log_stacks(_number: int, _frame: FrameType | None) -> None:
    log.warning("all threads:\n%s", all_stacks())


def load_real(config: ServerConfig, ranks: RankZero | None = None) -> Load:
    def load(progress: Progress) -> tuple[ServedEngine, Loaded]:
        progress("importing torch", None)
        from runtime.loading import load_engine  # takes seconds: see the module's docstring

        adopt_libraries()
        return load_engine(config, progress, ranks)

    return load


if __name__ == "__main__":
    serve()
