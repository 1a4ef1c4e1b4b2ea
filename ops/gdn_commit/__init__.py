"""Fold GDN records into the stored state."""

from compiled_mtp.ops.gdn_commit.op import gdn_commit

__all__ = ["gdn_commit"]
