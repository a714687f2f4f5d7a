"""Attention masks as functions of indices: proved causal, windowed, packed, or not proved and why."""
