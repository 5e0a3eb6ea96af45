"""What every test needs to know: which tests this machine can run, and that the GIL is off."""

import signal
import sys
import sysconfig

import pytest

import engine  # noqa: F401  (sets what torch reads once, before any test loads torch)


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background jobs ignore Ctrl-C, and so would the programs that tests interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes")


def pytest_report_header() -> str:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return f"free-threaded build: {free_threaded}, GIL: {'on' if gil else 'off'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {"slow": None if config.getoption("--slow") else "takes minutes: --slow runs it"}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch  # seconds: only where a test asks for a GPU

        reasons["gpu"] = None if torch.cuda.is_available() else "needs a CUDA device"
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
