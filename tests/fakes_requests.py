"""What the engine tells of requests, where a test needs little of them."""

import numpy as np

from engine.request import Request, SamplingParams, Started


def started(request_id: int, prompt_tokens: int, queued_s: float, begun_s: float) -> Started:
    """A request got its first token."""
    prompt = np.zeros(prompt_tokens, np.int32)
    request = Request(request_id, prompt, SamplingParams(max_new_tokens=1), seed=0)
    return Started(request, 0, queued_s=queued_s, begun_s=begun_s)
