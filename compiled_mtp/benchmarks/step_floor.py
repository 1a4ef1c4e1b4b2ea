"""The bytes that a decode step must read and write: its floor, in units of the memory's bandwidth."""

from __future__ import annotations

import torch

from compiled_mtp.runner.runner import Runner


def floor_bytes(runner: Runner, batch: int, context: int, *, has_own_drafts: bool = True) -> dict[str, float]:
    """Bytes that one step must read and write, by item; the model's shape decides, not the implementation.

    has_own_drafts: drafts read what `draft_dtype` made of their weights; else those in the dtype of the rest.
    """
    spec, step, mtp_step = runner.spec, runner.step, runner.step.mtp_step
    config, rows = spec.model, batch * (mtp_step + 1)
    embedding = step.target.embed.weight
    codes = step.target.head_codes
    head_bytes = step.target.head_weight.nbytes if codes is None else codes[0].nbytes + codes[1].nbytes
    # Of drafts' own weights, the names of those that are FP8 now.
    rounded = spec.drafts.formats(config, spec.weight_formats).keys() - spec.weight_formats.keys()

    def read_bytes(name: str, parameter: torch.Tensor) -> int:
        if has_own_drafts or name.removesuffix("_scale") not in rounded:
            return parameter.nbytes
        return 0 if name.endswith("_scale") else parameter.numel() * spec.dtype.itemsize

    def expert_share(tokens: int) -> float:
        """Distinct experts of independently routed tokens, over all experts."""
        return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens

    def layer_bytes(module: torch.nn.Module, tokens: int, prefix: str = "") -> float:
        total = 0.0
        for name, parameter in module.named_parameters():
            count = read_bytes(prefix + name, parameter)
            # Stacks of experts, and their factors; groups of four-bit codes have four dimensions.
            if config.num_experts and ".ffn." in f".{name}" and parameter.dim() >= 3:
                one = count / parameter.shape[0]
                total += one + one * config.num_experts * expert_share(tokens)
            else:
                total += count
        return total

    state = sum(b[0].nbytes for name, b in step.state_cache.named_buffers() if name.endswith("state"))
    kv = next(step.kv_cache.buffers())
    block = kv[0].nbytes / step.kv_cache.block_size
    items = {
        "target_layers": sum(layer_bytes(layer, rows) for layer in step.target.layers),
        "target_head": float(head_bytes),
        "gdn_state": 2.0 * state * batch,
        "target_kv": block * context * batch * config.num_attention_layers,
        "embedding": float(rows * embedding[0].nbytes),
    }
    if step.draft is not None:
        chain = (mtp_step - 1) * layer_bytes(step.draft, batch, "mtp.")
        items["draft_layers"] = layer_bytes(step.draft, rows, "mtp.") + chain
        own = [part for part in (step.draft_head, step.draft_head_scale) if part is not None]
        if has_own_drafts and own:
            draft_head_bytes = sum(part.nbytes for part in own)
        else:
            num_rows = step.target.num_head_rows
            draft_head_bytes = head_bytes // num_rows * (spec.drafts.num_ids or num_rows)
        items["draft_heads"] = float(draft_head_bytes * mtp_step)
        items["draft_kv"] = block * context * batch * mtp_step
    return items
