"""Tensor parallelism: the ranks that share a model (docs/parallel.md)."""
