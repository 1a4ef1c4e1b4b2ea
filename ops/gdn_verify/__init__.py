"""The gated delta rule over a verify window, with the norm and gate that follow it."""

from compiled_mtp.ops.gdn_verify.reference import gdn_verify

__all__ = ["gdn_verify"]
