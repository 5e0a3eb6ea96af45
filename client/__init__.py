"""What talks to a server over HTTP: `plait bench` and `plait chat`. Works with any OpenAI server.

Knows nothing of the engine, of `runtime` or of `httpd`.
"""
