"""Several processes that serve one model: rank 0 decides, the others execute."""
