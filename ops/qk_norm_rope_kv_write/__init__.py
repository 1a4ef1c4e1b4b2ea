"""Query and key norm, rotary embedding, and the write of keys and values to the paged cache."""

from compiled_mtp.ops.qk_norm_rope_kv_write.reference import qk_norm_rope_kv_write

__all__ = ["qk_norm_rope_kv_write"]
