"""Ullage: reinforcement-learning post-training for language models that knows what fits."""

__version__ = "0.1.0"
