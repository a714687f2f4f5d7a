"""Decide whether a fusion pays: measured tables, formulas, measuring on the spot."""
