"""Where workloads come from. Every dataset is seeded: the same options ask the same questions."""
