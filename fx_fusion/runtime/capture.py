"""CUDA graphs that the user captures: each replay repeats the kernels of the capture, and nothing can be compiled in it."""

import torch


def is_capturing() -> bool:
    """Return True if a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
