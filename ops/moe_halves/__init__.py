"""The experts' two products apart: between them ranks gather the hidden values."""

from compiled_mtp.ops.moe_halves.reference import moe_hidden, moe_hidden_w8a8, moe_sums, moe_sums_w8a8

__all__ = ["moe_hidden", "moe_hidden_w8a8", "moe_sums", "moe_sums_w8a8"]
