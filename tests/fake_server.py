"""A server without a model, for tests that need a process: `python -m tests.fake_server JSON`.

JSON holds ServerConfig's fields, and beyond those
gate                          a file; loading ends once it exists
error                         what loading fails with
api_key_file, admin_key_file  as the flags of these names
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelError
from runtime import serve
from runtime.config import ServerConfig
from runtime.engine_thread import Load
from runtime.gil import restart_without_gil
from runtime.keys import ADMIN_KEYS, API_KEYS, take_keys
from tests.fakes_engine import fake_load


def _load(gate: str | None, error: str | None) -> Load:
    if gate is None:
        return fake_load(error=None if error is None else ModelError(error))
    opened = threading.Event()

    def open_when_there() -> None:
        while not Path(gate).exists():
            time.sleep(0.005)
        opened.set()

    threading.Thread(target=open_when_there, daemon=True).start()
    return fake_load(gate=opened)


def main() -> None:
    restart_without_gil()
    settings = json.loads(sys.argv[1])
    load = _load(settings.pop("gate", None), settings.pop("error", None))
    for name in ("tls_cert", "tls_key"):
        if name in settings:
            settings[name] = Path(settings[name])
    for kind, variable in (("api", API_KEYS), ("admin", ADMIN_KEYS)):
        file = settings.pop(f"{kind}_key_file", None)
        settings[f"{kind}_keys"] = take_keys(None if file is None else Path(file), variable)
    settings.setdefault("http_loops", 1)  # on any machine
    config = ServerConfig(EngineConfig(Path("fake"), max_running=8), port=0, **settings)
    code, all_ended = serve.run(config, load)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon]
    print(f"exit {code} all_ended={all_ended} left={left}", flush=True)
    if not all_ended:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
