"""What a decode step needs at least: the bytes that it must read and write, and the products of its rows.

Its *floor* is the time of the bytes. Its *roof* also counts tensor cores, which decide with many requests:
the larger of the time of the weights' bytes and of the products, plus the time of all other bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from compiled_mtp.benchmarks.gpu_rates import Rates
from compiled_mtp.models.linear import Linear
from compiled_mtp.models.moe import MoE
from compiled_mtp.runner.runner import Runner

# Items of `floor_bytes` that are weights: they are read while tensor cores multiply.
_WEIGHTS = ("target_layers", "target_head", "draft_layers", "draft_heads")


def roof_ms(items: Mapping[str, float], flops: Mapping[str, float], rates: Rates) -> float:
    """Return the milliseconds of a step's roof, from its `floor_bytes` and `product_flops`."""
    weight_bytes = sum(count for name, count in items.items() if name in _WEIGHTS)
    products_s = flops["bf16"] / rates.bf16_flops + flops["fp8"] / rates.fp8_flops
    other_s = (sum(items.values()) - weight_bytes) / rates.read_bytes
    return 1e3 * (max(weight_bytes / rates.read_bytes, products_s) + other_s)


def product_flops(runner: Runner, batch: int) -> dict[str, float]:
    """Operations of a step's products with weights, two for each weight of a row: "fp8" for quantised rows,
    "bf16" for all others."""
    step, mtp_step, config = runner.step, runner.step.mtp_step, runner.spec.model
    rows = batch * (mtp_step + 1)
    flops = {"bf16": 0.0, "fp8": 0.0}

    def add(weights: int, quantised: int, num_rows: int) -> None:
        flops["fp8"] += 2.0 * quantised * num_rows
        flops["bf16"] += 2.0 * (weights - quantised) * num_rows

    def quantised(module: torch.nn.Module) -> int:
        """Weights of a row's products that take the row quantised."""
        experts = config.num_experts_per_tok * config.moe_intermediate_size
        mixture = 3 * config.hidden_size * (experts + config.shared_expert_intermediate_size)
        linears = [part for part in module.modules() if isinstance(part, Linear) and part.quantizes_rows]
        mixtures = [part for part in module.modules() if isinstance(part, MoE) and part.quantizes_rows]
        return sum(part.weight.numel() for part in linears) + mixture * len(mixtures)

    add(config.active_weights, quantised(step.target.layers), rows)
    add(step.target.num_head_rows * config.hidden_size, 0, rows)
    if step.draft is not None:
        layer = replace(config, num_layers=1, is_full_attention=(True,)).active_weights
        passes = rows + (mtp_step - 1) * batch
        add(layer + 2 * config.hidden_size**2, quantised(step.draft), passes)
        head = (runner.spec.drafts.num_ids or step.target.num_head_rows) * config.hidden_size
        add(head, head if step.quantizes_draft_rows else 0, mtp_step * batch)
    return flops


def floor_bytes(runner: Runner, batch: int, context: int, *, has_own_drafts: bool = True) -> dict[str, float]:
    """Bytes that one step must read and write, by item; the model's shape decides, not the implementation.

    has_own_drafts: drafts read what `draft_dtype` made of their weights; else those in the dtype of the rest.
    """
    spec, step, mtp_step = runner.spec, runner.step, runner.step.mtp_step
    config, rows = spec.model, batch * (mtp_step + 1)
    embedding = step.target.embed.weight
    head_bytes = step.target.head_bytes
    # The names of the drafts' own weights that are FP8 now.
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
