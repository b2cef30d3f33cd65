"""Benchmarks of this program on whatever device it finds; each writes what it measured, with hardware and versions."""
