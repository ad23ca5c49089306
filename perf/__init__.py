"""Benchmarks of TokenSpeed: ``python -m perf`` lists and runs them."""
