"""Drafting, verification and their statistics."""
