"""Handing a rewritten graph to Inductor: options, cache key, its choice of layouts."""
