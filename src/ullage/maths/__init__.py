"""Pure functions on tensors: advantages, losses, KL estimators, aggregation, corrections. No state, config or logging.

Shape letters: N samples, G groups, T response tokens (right-padded), K rewards of one sample, V vocabulary, D hidden
size. What is computed per token is 0 where the mask is. A function that needs a statistic of the whole batch takes the
communicator of the ranks, so that its result does not depend on how samples are spread over them.
"""
