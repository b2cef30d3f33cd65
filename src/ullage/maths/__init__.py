"""Pure functions on tensors: advantages, losses, KL estimators, aggregation. No state, no config, no logging.

Shape letters: N samples, T response tokens (right-padded), V vocabulary, D hidden size.
"""
