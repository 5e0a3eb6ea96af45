"""`plait chat`: a conversation in the terminal with any OpenAI-compatible server."""
