"""A stand-in for flash-linear-attention where no GPU is: its gated delta rule, token by token, with its interface."""

__version__ = "0.6.0"
