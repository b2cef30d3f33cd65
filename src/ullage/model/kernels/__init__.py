"""Kernels as `torch.library` custom ops, each with a fake implementation for tracing and a plain-torch twin."""
