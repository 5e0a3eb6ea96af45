"""Prepares what `plait` needs: an interpreter, locked packages and a small real model.

Everything here but `convert_gguf` runs on the machine's own Python 3.11 or later with the standard
library alone, because it runs before any package is there. It knows nothing of the engine or the
server.
"""
