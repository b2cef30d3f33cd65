"""Rewards: one file each, and the worker processes in which they run. No torch here.

To add one, write `rewards/my_reward.py` with `def score(prompt, response, target, **kwargs) -> float`, doctest examples
in it, and its name in `signatures.BUILT_IN`. One that extracts an answer returns `results.Judged`, for majority votes.
"""
