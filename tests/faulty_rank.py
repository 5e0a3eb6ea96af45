"""`runtime.serve` as a rank that waits or raises where a test says: `python -m … FOLDER FLAGS`.

Files in FOLDER
hold            nobody goes on loading while it is there; held-RANK tells that a rank waits
raise-RANK      that rank raises at its next step, or at the end of its wait
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import engine.descriptor
import engine.generation_config
from runtime.serve import serve

_decode, _eos_ids = engine.descriptor.decode, engine.generation_config.eos_ids


def main() -> None:
    folder = Path(sys.argv.pop(1))
    fault = folder / f"raise-{os.environ['RANK']}"

    def check() -> None:
        if fault.exists():
            raise RuntimeError("a fault on purpose")

    def decode(*arguments: Any) -> engine.descriptor.StepDescriptor:
        check()
        return _decode(*arguments)

    def eos_ids(model: Path) -> tuple[int, ...]:
        while (folder / "hold").exists():
            (folder / f"held-{os.environ['RANK']}").touch()
            check()
            time.sleep(0.01)
        return _eos_ids(model)

    # Before what uses them is imported, which is on the engine thread.
    engine.descriptor.decode, engine.generation_config.eos_ids = decode, eos_ids
    serve()


if __name__ == "__main__":
    main()
