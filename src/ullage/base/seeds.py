"""Seeds derived from what a number is for, so that no result depends on order, batching, ranks or restarts."""

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit seed from its parts, e.g. (run seed, step, prompt id, sample index, attempt, turn)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
