"""Causal attention of query rows over paged keys and values, with the output gate."""

from compiled_mtp.ops.paged_attention.reference import paged_attention

__all__ = ["paged_attention"]
