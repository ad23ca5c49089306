"""Benchmarks of hopper."""
