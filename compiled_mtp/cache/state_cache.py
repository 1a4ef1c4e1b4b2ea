"""GDN state: one canonical float32 state per request and layer, and rings of the later tokens' inputs.

Verification does not write a state per row of the window. The state is valid for positions < `base`. Rings
indexed by absolute position mod `ring_length` hold the entries of later tokens (k after l2norm,
u = beta (v - read), exp(g)) and the raw inputs of the convolution. The next verification folds [base, pos)
into the state, so a rejection only changes an integer: rejected entries are overwritten. A request has one
state, however many drafts a round verifies; only its rings grow with that number. A round on a GPU stores a
folded state only if more than `max_unfolded` entries would be left; else base stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from compiled_mtp.cache.slot_tensors import SlotTensor
from compiled_mtp.cache.stacked import stack
from compiled_mtp.model_config import ModelConfig

# A round that leaves entries unfolded saves the write of a state, and later rounds fold each of them again.
# With three drafts and many requests, 8 take less time than 4 and than 12.
MOST_UNFOLDED = 8


def ring_length(max_drafts: int, conv_kernel: int) -> int:
    """The smallest power of two >= max(2 W, W + conv_kernel - 1), W = max_drafts + 1.

    2 W: a write at pos..pos+W-1 must not hit an entry of [base, pos) that another program still folds.
    W + conv_kernel - 1: it must not hit a raw input that the window's first rows still read.
    """
    query_len = max_drafts + 1
    needed = max(2 * query_len, query_len + conv_kernel - 1)
    return 1 << (needed - 1).bit_length()


class GDNLayer(nn.Module):
    """One layer's state of all request rows; row 0 is the padding row.

    state [slots, nv, dv, dk], ring_k [slots, nk, R, dk], ring_u [slots, nv, R, dv], ring_g [slots, nv, R]
    (exp(g)), all float32; conv_ring [slots, R, C] in the model's dtype. Views of memory that all layers
    share. Only operators touch them. max_unfolded: as `gdn_verify` takes it.
    """

    state: torch.Tensor
    ring_k: torch.Tensor
    ring_u: torch.Tensor
    ring_g: torch.Tensor
    conv_ring: torch.Tensor

    def __init__(self, own: Mapping[str, torch.Tensor], max_unfolded: int) -> None:
        super().__init__()
        self.max_unfolded = max_unfolded
        for name, tensor in own.items():
            self.register_buffer(name, tensor)


class StateCache(nn.Module):
    """The states of every GDN layer. A slot needs no clearing when it is given out.

    Prefill from position 0 reads neither state nor ring, and sets base = pos = N, so that no entry of an
    earlier owner is folded (the tests fill free slots with NaN).
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        max_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
        usual_drafts: int | None = None,
    ) -> None:
        """max_drafts: the most that a round verifies; usual_drafts: that most rounds verify, None for as
        many."""
        super().__init__()
        self.ring_length = ring = ring_length(max_drafts, config.conv_kernel)
        # Unfolded entries and the next window then fit into the ring: a window has at most half its length.
        # Few drafts fill a ring slowly: entries of many rounds would be folded again and again. A CPU folds
        # in place, where an unfolded state would be a copy more.
        usual = ring if usual_drafts is None else ring_length(usual_drafts, config.conv_kernel)
        self.max_unfolded = 0 if device.type == "cpu" else min(ring // 2, usual, MOST_UNFOLDED)
        num_k, num_v = config.linear_num_key_heads, config.linear_num_value_heads
        dim_k, dim_v = config.linear_key_head_dim, config.linear_value_head_dim

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return stack(config.num_gdn_layers, (slots, *shape), dtype, device, is_zero=True)

        # All layers together, by name: [layers, slots, ...].
        self._stacks = {
            "state": zeros(num_v, dim_v, dim_k),
            "ring_k": zeros(num_k, ring, dim_k),
            "ring_u": zeros(num_v, ring, dim_v),
            "ring_g": zeros(num_v, ring),
            "conv_ring": zeros(ring, config.linear_conv_dim, dtype=dtype),
        }
        # Views are made once: the compiler would have to trace through a view made in forward.
        self.layers = nn.ModuleList(
            GDNLayer({name: tensor[index] for name, tensor in self._stacks.items()}, self.max_unfolded)
            for index in range(config.num_gdn_layers)
        )

    def slot_tensors(self) -> Iterator[SlotTensor]:
        """Yield the states, rings and conv inputs of all layers together, as they move with a request.

        Prefill folds no ring entries, so a state snapshot leaves these out.
        """
        for name, tensor in self._stacks.items():
            is_read = name in ("state", "conv_ring")
            yield SlotTensor(f"gdn.{name}", tensor.transpose(0, 1), is_in_snapshot=is_read)
