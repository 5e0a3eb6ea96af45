"""The OpenAI-compatible HTTP interface: Starlette routes over a `Service` that runtime provides."""
