"""Benchmarks that are installed: load on a service, and the time of a step. Tools hold the others."""
