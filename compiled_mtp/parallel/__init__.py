"""Ranks that hold a model together: docs/parallel.md."""
