"""Causal convolution, l2norm and gates of a GDN layer, for verify windows and for prefill."""

from compiled_mtp.ops.spec_conv1d.reference import GDNInputs, conv_prefill, spec_conv1d

__all__ = ["GDNInputs", "conv_prefill", "spec_conv1d"]
