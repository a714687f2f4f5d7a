"""Differentiable torch ops around kernels: schema, autograd, CPU reference, tracing."""
