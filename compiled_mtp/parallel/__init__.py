"""Tensor parallelism: the ranks that hold a model together (docs/parallel.md)."""
