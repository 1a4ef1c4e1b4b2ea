"""RMS norm of rows, alone or after a residual add."""

from compiled_mtp.ops.rms_norm.op import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
