"""DAPO's penalty for responses that come close to the length limit; no tensors, so that rewards can use it."""


def overlong_penalty(length: int, *, max_length: int, buffer: int, factor: float) -> float:
    """What to add to the reward (arXiv:2503.14476 eq. 13): 0 up to max_length - buffer tokens, then down to -factor.

    The fall is linear over the buffer and goes on beyond `max_length`. Without a buffer there is no penalty.
    """
    if buffer <= 0:
        return 0.0
    return -max(length - (max_length - buffer), 0) / buffer * factor
