"""A model's text, while it streams, as reasoning, content and tool calls. `formats` is the door."""
