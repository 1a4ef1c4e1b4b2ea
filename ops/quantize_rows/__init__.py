"""Quantize activations to e4m3, with one factor for every 128 columns of a row."""

from compiled_mtp.ops.quantize_rows.reference import quantize_rows

__all__ = ["quantize_rows"]
