"""Benchmarks of kernel."""
