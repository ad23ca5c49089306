"""Benchmarks of serve."""
