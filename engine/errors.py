"""What loading a model can fail with.

ValueError
 └── ModelError    a checkpoint or a setting that cannot be served; the message names it
"""


class ModelError(ValueError):
    """The checkpoint is broken or of a kind that is not supported; says what and where."""
