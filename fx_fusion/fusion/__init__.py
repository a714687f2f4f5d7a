"""Declaring a fusion, finding where it fits, and deciding whether it may be rewritten there."""
