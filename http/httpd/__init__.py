"""The HTTP interface in the words of OpenAI and Anthropic: Starlette routes over a `Service`."""
