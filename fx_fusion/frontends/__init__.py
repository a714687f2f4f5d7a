"""Declare the front ends, a library a file: ``fx_fusion.frontend`` says what one is."""
