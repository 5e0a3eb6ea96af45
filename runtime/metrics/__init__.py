"""What a server counts and measures of itself, and how Prometheus reads it.

Each counter has one thread that writes it. Readers look without a lock and may see a value a moment
late; a histogram's count is the sum of its buckets, so that a reader never sees the two disagree.
"""
