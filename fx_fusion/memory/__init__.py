"""Choose what is saved for the backward, and what of it the backward computes again instead."""
