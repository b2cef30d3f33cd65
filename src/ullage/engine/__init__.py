"""How training runs on devices: optimizer, ranks, recompute, memory measurement, checkpoints."""
