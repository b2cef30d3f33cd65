"""The training loop and what it is made of: collecting experience, mini-batches, evaluation, state."""
