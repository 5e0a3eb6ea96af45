"""Flags to settings; what is refused, and how."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from engine.config import EngineConfig
from httpd.auth import Keyring
from runtime import serve
from runtime.address import listen
from runtime.checkpoint import find_checkpoint, find_config
from runtime.config import ServerConfig
from runtime.gil import is_free_threaded_build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The settings of each server that would have been started."""
    configs: list[ServerConfig] = []

    def run(config: ServerConfig, _load: object, _asked: object) -> tuple[int, bool]:
        configs.append(config)
        return 0, True

    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "restart_without_gil", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return configs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of which nothing is read before the engine thread but this."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_no_flags_give_the_defaults_of_the_settings(seen: list[ServerConfig], model: Path) -> None:
    result = CliRunner().invoke(serve.serve, ["--model", str(model)])
    assert result.exit_code == 0, result.output
    assert seen == [ServerConfig(EngineConfig(model))]


def test_every_setting_has_a_flag(seen: list[ServerConfig], model: Path) -> None:
    cert = model / "cert.pem"
    cert.touch()
    engine = {
        "device": "cpu", "dtype": "float32", "load_format": "dummy", "page_size": 16,
        "max_running": 3, "max_model_len": 99, "prefill_budget": 64, "max_kv_tokens": 640,
        "memory_fraction": 0.5, "cache": "naive", "cpu_threads": 1, "seed": 7,
    }  # fmt: skip
    rest = {
        "served_model_name": "some/name", "host": "::1", "port": 0, "tokenizer_threads": 1,
        "max_queued": 5, "max_queued_tokens": 77, "max_choices": 3, "max_body_bytes": 2048,
        "max_streams": 9, "tls_cert": cert, "tls_key": cert, "request_timeout_s": 8.0,
        "drain_timeout_s": 1.5, "watchdog_s": 9.0,
    }  # fmt: skip
    flags = [
        word
        for name, value in {**engine, **rest}.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    flags += ["--no-overlap", "--access-log", "--cors-origin", "a", "--cors-origin", "b"]
    result = CliRunner().invoke(serve.serve, ["--model", str(model), *flags])
    assert result.exit_code == 0, result.output
    expected = ServerConfig(
        EngineConfig(model, overlap=False, **engine),  # type: ignore[arg-type]
        access_log=True,
        cors_origins=("a", "b"),
        **rest,  # type: ignore[arg-type]
    )
    assert seen == [expected]


def test_keys_come_from_files_and_the_environment(
    seen: list[ServerConfig], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, admin = model / "api", model / "admin"
    api.write_text("sk-one\n")
    admin.write_text("sk-admin\n")
    monkeypatch.setenv("PLAIT_API_KEYS", "sk-two")
    flags = ["--api-key-file", str(api), "--admin-key-file", str(admin)]
    result = CliRunner().invoke(serve.serve, ["--model", str(model), *flags])
    assert result.exit_code == 0, result.output
    assert seen[0].api_keys == Keyring.of(["sk-one", "sk-two"])
    assert seen[0].admin_keys == Keyring.of(["sk-admin"])
    assert "sk-" not in repr(seen[0]) + result.output
    assert "PLAIT_API_KEYS" not in os.environ


@pytest.mark.parametrize("variable", ["PLAIT_API_KEYS", "PLAIT_ADMIN_KEYS"])
def test_an_empty_variable_is_refused_as_it_was_meant_to_be_full(
    seen: list[ServerConfig], model: Path, variable: str
) -> None:
    result = CliRunner().invoke(serve.serve, ["--model", str(model)], env={variable: ""})
    assert result.exit_code == 2 and f"{variable} holds no key" in result.output and not seen


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.168.0.1", False), ("localhost.example", False),
     ("", False)],
)  # fmt: skip
def test_admins_need_a_key_unless_nobody_else_can_call(host: str, is_open: bool) -> None:
    engine = EngineConfig(Path())
    assert ServerConfig(engine, host=host).access.is_admin_open == is_open
    for keys in ({"api_keys": Keyring.of(["a"])}, {"admin_keys": Keyring.of(["a"])}):
        assert not ServerConfig(engine, host=host, **keys).access.is_admin_open


def test_a_prefill_budget_of_zero_is_whole_prompts(seen: list[ServerConfig], model: Path) -> None:
    CliRunner().invoke(serve.serve, ["--model", str(model), "--prefill-budget", "0"])
    assert seen[0].engine.prefill_budget is None


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ([], EngineConfig(Path()).cuda_graph_max_rows),
        (["--cuda-graph-max-bs", "8", "--max-running", "8"], 8),
        (["--cuda-graph-max-bs", "1"], 1),
        (["--no-cuda-graph"], 0),
    ],
    ids=str,
)
def test_flags_of_cuda_graphs(
    seen: list[ServerConfig], model: Path, flags: list[str], rows: int
) -> None:
    CliRunner().invoke(serve.serve, ["--model", str(model), *flags])
    assert seen[0].engine.cuda_graph_max_rows == rows


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--cuda-graph-max-bs", "0"], "is 0; it must be between 1 and max_running, 256"),
        (
            ["--cuda-graph-max-bs", "9", "--max-running", "8"],
            "cuda_graph_max_bs is 9; it must be between 1 and max_running, 8",
        ),
        (["--cuda-graph-max-bs", "9", "--no-cuda-graph"], "but no_cuda_graph is given"),
        (["--load-format", "gguf"], "load_format is 'gguf'; it must be auto or dummy"),
        (["--page-size", "0"], "page_size is 0; it must be between 1 and 256"),
        (["--prefill-budget", "-1"], "prefill_budget is -1; it must be between"),
        (["--port", "65536"], "port is 65536; it must be between 0 and 65535"),
        (["--cache", "tree"], "cache is 'tree'; it must be radix or naive"),
        (["--memory-fraction", "1.5"], "memory_fraction is 1.5; it must be in (0, 1]"),
        (["--memory-fraction", "nan"], "memory_fraction is nan"),
        (["--watchdog-s", "nan"], "watchdog_s is nan; it must be between"),
        (["--tokenizer-threads", "0"], "tokenizer_threads is 0; it must be between 1 and 64"),
        (["--max-queued", "0"], "max_queued is 0; it must be between 1 and"),
        (["--max-queued-tokens", "0"], "max_queued_tokens is 0; it must be between 1 and"),
        (["--max-choices", "0"], "max_choices is 0; it must be between 1 and"),
        (["--request-timeout-s", "0"], "request_timeout_s is 0.0; it must be between 0.1 and"),
        (["--api-key-file", "no/such"], "the key file no/such cannot be read: No such file"),
        (["--admin-key-file", os.devnull], f"the key file {os.devnull} holds no key"),
        (["--served-model-name", ""], "served_model_name is empty"),
        (["--tls-cert", "x.pem"], "tls_cert and tls_key must be given together"),
        (["--tls-cert", "x.pem", "--tls-key", "x.pem"], "tls_cert is x.pem; there is no such file"),
        (["--page-size", "many"], "'many' is not a valid integer"),
        (
            ["--max-model-len", "2049"],
            "max_model_len is 2049, but the checkpoint's context is 2048",
        ),
        (
            ["--max-model-len", "200", "--max-kv-tokens", "191"],
            "max_model_len is 200, but the KV pool holds 128 tokens",
        ),
        (["--max-kv-tokens", "63"], "max_kv_tokens is 63; it must be at least a page, 64 tokens"),
        (["--model", "no/such/folder"], "model is no/such/folder; it must be a folder or"),
    ],
)
def test_a_bad_flag_is_refused_with_field_value_and_limit(
    seen: list[ServerConfig], model: Path, flags: list[str], told: str
) -> None:
    result = CliRunner().invoke(serve.serve, ["--model", str(model), *flags])
    assert result.exit_code == 2 and told in result.output and not seen


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": ["GPT2LMHeadModel"]}'])
def test_a_config_json_that_cannot_be_served_ends_at_once(
    seen: list[ServerConfig], model: Path, text: str
) -> None:
    (model / "config.json").write_text(text)
    result = CliRunner().invoke(serve.serve, ["--model", str(model)])
    assert result.exit_code == 1 and not seen
    assert result.output.startswith("Error: the model cannot be loaded: ")
    assert str(model / "config.json") in result.output and result.output.count("\n") == 1


def test_help_names_each_flag_with_a_text() -> None:
    told = CliRunner().invoke(serve.serve, ["--help"]).output
    for name in ("--page-size", "--overlap / --no-overlap", "--drain-timeout-s", "--seed"):
        assert name in told
    assert all(option.help for option in serve.serve.params if isinstance(option, click.Option))


def test_ranks_that_torchrun_did_not_start_so_are_refused(
    seen: list[ServerConfig], model: Path
) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}
    result = CliRunner().invoke(serve.serve, ["--model", str(model), "--tp", "2"], env=environ)
    assert result.exit_code == 2 and not seen
    assert "tp is 2, but torchrun started 4 processes" in result.output


def test_more_ranks_than_heads_are_refused_before_any_starts(
    seen: list[ServerConfig], model: Path
) -> None:
    result = CliRunner().invoke(serve.serve, ["--model", str(model), "--tp", "8"])
    assert result.exit_code == 2 and not seen
    assert "8 ranks are too many: the model has 4 attention heads" in result.output


def test_a_port_in_use_is_told_without_a_stack(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ServerConfig(EngineConfig(tmp_path), port=taken.getsockname()[1])
        with pytest.raises(
            click.ClickException, match="cannot listen on 127.0.0.1 port .*--port 0"
        ):
            listen(config)


def test_a_folder_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("org/model") == Path("org/model")


@pytest.mark.parametrize("name", ["", "a b/c", "../x", "file.gguf"])
def test_what_is_no_folder_and_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it must be a folder or a name like org/model"):
        find_checkpoint(str(tmp_path / "none" / "x") if not name else name)


def test_what_is_wrong_with_a_path_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="and this is a file"):
        find_checkpoint(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match="and there is no such folder"):
        find_config(str(tmp_path / "model"))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", "CPU", ""])
def test_a_device_that_does_not_exist_is_refused_before_loading(device: str) -> None:
    with pytest.raises(ValueError, match="must be auto, cpu, cuda or cuda:N"):
        EngineConfig(Path("m"), device=device)


@pytest.mark.skipif(not is_free_threaded_build(), reason="this Python always has a GIL")
@pytest.mark.parametrize("gil", [None, "1"])
def test_a_start_with_the_gil_on_is_repeated_without(gil: str | None) -> None:
    """With its arguments, and in the same process."""
    program = (
        "import os, sys; from runtime.gil import *; print(os.getpid(), flush=True);"
        "restart_without_gil(); print(is_gil_enabled(), sys.argv[1:], check_gil())"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    if gil is not None:
        environ["PYTHON_GIL"] = gil
    command = [sys.executable, "-c", program, "an argument", "-x"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first == second and last == "False ['an argument', '-x'] None"
