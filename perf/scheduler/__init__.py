"""Benchmarks of scheduler."""
