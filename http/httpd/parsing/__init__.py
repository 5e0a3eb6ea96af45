"""A model's answer, while it streams, as content and tool calls. `formats` is the door."""
