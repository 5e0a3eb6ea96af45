"""What can be wrong with a checkpoint, and with a request on its way to the engine.

ValueError
 └── ModelError    a checkpoint or a setting that cannot be served; the message names it
Exception
 ├── PromptError   the prompt itself: the client's fault, a 400
 └── MatchError    an output whose grammar cannot be followed further: it ends with an error
      └── NothingFits   what the client asks for cannot all be had: likewise, but its own fault
"""

import re


class ModelError(ValueError):
    """The checkpoint is broken or of a kind that is not supported; says what and where.

    One line, whatever the library said whose words are part of it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(r"\s*\n\s*", " ", message.strip()))


class PromptError(Exception):
    """A prompt that cannot be turned into token ids; names the field that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # "messages", "prompt", or a place inside: "messages[0].content[1]"


class MatchError(Exception):
    """A grammar cannot be followed further; says why, for the client."""


class NothingFits(MatchError):
    """No token is left that everything which the request asks for allows."""
