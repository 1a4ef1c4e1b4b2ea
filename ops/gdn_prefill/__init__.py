"""The gated delta rule over prompt chunks, with the norm and gate that follow it."""

from compiled_mtp.ops.gdn_prefill.reference import gdn_prefill

__all__ = ["gdn_prefill"]
