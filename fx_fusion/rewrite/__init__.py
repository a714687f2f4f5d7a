"""Changing a graph: replacing matches, cutting off outputs that wait, keeping results apart."""
