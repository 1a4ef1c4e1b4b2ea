"""Activations in e4m3, one factor for each 128 columns of a row."""

from compiled_mtp.ops.quantize_rows.reference import quantize_rows

__all__ = ["quantize_rows"]
