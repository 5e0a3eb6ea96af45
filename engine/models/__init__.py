"""The models: one decoder for all families, described by a `ModelConfig`."""
