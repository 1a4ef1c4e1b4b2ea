"""Paged keys and values, held in buffers of modules: torch.compile may mutate these at static addresses."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.cache.stacked import stack
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.ops.device import capability_of
from compiled_mtp.ops.fp8 import converts_fp8

KV_SCALE_BYTES = 4


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of pages for `kv_dtype` in EngineConfig and activations of `dtype`.

    Raises ValueError for FP8 on a GPU whose kernels cannot convert it.
    """
    if name == "auto":
        return dtype
    if device.type == "cuda" and not converts_fp8(device):
        major, minor = capability_of(device)
        raise ValueError(
            f"kv_dtype must be auto below compute capability 8.9, got {name} on {major}.{minor}; "
            "use kv_dtype=auto or a newer GPU"
        )
    kv_dtype = getattr(torch, name)
    assert isinstance(kv_dtype, torch.dtype)
    return kv_dtype


class KVLayer(nn.Module):
    """One layer's pages: `kv` [num_blocks, 2 (key, value), num_kv_heads, block_size, head_dim].

    `kv_scale` [num_blocks, 2, num_kv_heads, block_size] float32 belongs to FP8 pages and is None otherwise.
    Both are views of memory that all layers share. Only operators touch either: an aten write into a view
    makes the compiler copy the whole cache.
    """

    kv: torch.Tensor
    kv_scale: torch.Tensor | None

    def __init__(self, kv: torch.Tensor, kv_scale: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("kv", kv)
        self.register_buffer("kv_scale", kv_scale)


class KVCache(nn.Module):
    """The pages of the target's full-attention layers and, last, of the MTP layer; one block table serves
    all.

    Block 0 belongs to no request. A block id is an index into every layer's pages. experts [layers,
    num_blocks, block_size * top_k] int16, if `records_experts`: the experts of each token and layer; else
    None.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        with_draft: bool,
        records_experts: bool = False,
    ) -> None:
        super().__init__()
        num_layers = config.num_attention_layers
        shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        # Not set: pages are written before they are read, and a CPU backs only written memory, so that a
        # large pool takes no more than requests use. Padding reads block 0.
        kv = stack(num_layers + with_draft, shape, dtype, device, is_zero=False)
        kv[:, 0] = 0
        scale = None
        if dtype == torch.float8_e4m3fn:
            scale = stack(num_layers + with_draft, shape[:-1], torch.float32, device, is_zero=False).fill_(1)
        own = [KVLayer(kv[i], None if scale is None else scale[i]) for i in range(num_layers + with_draft)]
        self.layers = nn.ModuleList(own[:num_layers])
        self.draft = own[num_layers] if with_draft else None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._stacks = {"kv": kv} if scale is None else {"kv": kv, "kv_scale": scale}
        self.experts: torch.Tensor | None = None
        if records_experts:
            by_block = (num_blocks, block_size * config.num_experts_per_tok)
            self.experts = stack(config.num_layers, by_block, torch.int16, device, is_zero=False)
            self._stacks["experts"] = self.experts

    def block_tensors(self) -> dict[str, torch.Tensor]:
        """Return what is copied with a block: views of all layers [num_blocks, layers, ...] int64.

        Words of 8 bytes copy faster than the elements themselves, and need no case for each dtype.
        """
        return {name: pages.transpose(0, 1).view(torch.int64) for name, pages in self._stacks.items()}
