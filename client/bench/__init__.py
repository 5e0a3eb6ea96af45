"""`plait bench`: load for an OpenAI-compatible server, and what its answers came to."""
