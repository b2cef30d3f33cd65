"""Rollout engines: each generates samples for prompts; `embedded` reads the trainer's own weights.

To add one: a file (or package) here with an `Engine` that has `generate(requests, sampling, on_finish)` and
`refresh(actor)`; it must pass the contract test in tests/rollout.
"""
