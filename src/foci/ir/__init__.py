"""The language of masks and scores: expressions, tracing, simplification, derivatives, intervals."""
