"""RMS norm of rows: alone, after a residual add, or of the (embedding, hidden) pairs that the draft reads."""

from compiled_mtp.ops.rms_norm.reference import add_rms_norm, add_rms_norm_quantized, pair_norm, rms_norm

__all__ = ["add_rms_norm", "add_rms_norm_quantized", "pair_norm", "rms_norm"]
