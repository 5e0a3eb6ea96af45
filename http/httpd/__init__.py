"""The HTTP interface, in OpenAI's and Anthropic's words: Starlette routes over runtime's `Service`."""
