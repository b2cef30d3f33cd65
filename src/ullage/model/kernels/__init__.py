"""Kernels as custom operators of torch, each with a fake implementation for tracing and a plain-torch twin."""
