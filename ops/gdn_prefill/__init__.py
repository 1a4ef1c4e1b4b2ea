"""The gated delta rule over a prefill chunk, with the norm and gate that follow it."""

from compiled_mtp.ops.gdn_prefill.reference import gdn_prefill

__all__ = ["gdn_prefill"]
