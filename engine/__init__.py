"""Scheduling, caching and executing models: everything between token ids in and token ids out.

The host half (`request`, `rows`, `pages`, `radix`, `scheduler`, `descriptor`, `detokenizer`)
imports no torch; the device half (`cpu_executor`, `cuda_executor`, `models`, `weights`) makes no
decision. They meet at `executor`, which is a Protocol.

Glossary: kv = keys and values; ids = token ids; q/k/v = query/key/value; rope = rotary position
embedding; eos = end of sequence; TTFT = time to first token; ITL = inter-token latency;
row = a running request's index in every per-request array; slot = a token's place in the KV pages
(page × page_size + offset); fence = the last launched step that still names a row or a page.
"""

import os
import sys
from pathlib import Path

# kernels/ is a source root: runtime/__init__.py says why. The engine needs what is in it also where
# it is imported without runtime, as `from engine.offline import LLM` does in a bare checkout.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and str(_root / "kernels") not in sys.path:
    sys.path.insert(0, str(_root / "kernels"))

# torch's CPU threads spin at every barrier by default. Where another thread wants their core (our
# own HTTP and text threads do), each barrier then lasts a time slice: a decode step took 615 ms
# instead of 82 ms beside one busy process on 2 cores. OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
