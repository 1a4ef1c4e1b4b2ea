"""The released shapes with random weights: their configuration, weights and synthetic acceptance.

A separate module, because the other ranks of a benchmark import `fill_random` by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.ops.int4 import pack_groups


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of one published checkpoint, from which the operators' cases are made."""

    name: str
    hidden: int
    linear_key_heads: int
    linear_value_heads: int
    query_heads: int
    kv_heads: int
    intermediate: int  # 0 for a mixture of experts
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    head_dim: int = 256
    linear_head_dim: int = 128
    vocab: int = 248320


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("0.8b", 1024, 16, 16, 8, 2, 3584),
        ModelShape("4b", 2560, 16, 32, 16, 4, 9216),
        ModelShape("9b", 4096, 16, 32, 16, 4, 12288),
        ModelShape("27b", 5120, 16, 48, 24, 4, 17408),
        ModelShape("35b-a3b", 2048, 16, 32, 16, 2, 0, experts=256, top_k=8, expert_intermediate=512),
    )
}
LAYERS = {"0.8b": 24, "4b": 32, "9b": 32, "27b": 64, "35b-a3b": 40}
TIED = {"0.8b", "4b"}
FP8_SIZE = 40.0


def model_config(
    name: str, quantized: bool = False, four_bit_group: int = 0, scaled_codes: str = ""
) -> ModelConfig:
    """Return the config of a released shape, without its checkpoint.

    quantized: with FP8 weights, as the FP8 release has them. four_bit_group: with four-bit weights in groups
    of this many columns, 0 for none. scaled_codes: with weights of this kind (ops.blocks), or Q4_K_M.
    """
    shape, layers = SHAPES[name], LAYERS[name]
    return ModelConfig(
        family="qwen3_5_moe" if shape.experts else "qwen3_5",
        num_layers=layers,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        num_q_heads=shape.query_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=shape.head_dim // 4,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        linear_num_key_heads=shape.linear_key_heads,
        linear_num_value_heads=shape.linear_value_heads,
        linear_key_head_dim=shape.linear_head_dim,
        linear_value_head_dim=shape.linear_head_dim,
        conv_kernel=4,
        is_full_attention=tuple((index + 1) % 4 == 0 for index in range(layers)),
        intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_intermediate,
        shared_expert_intermediate_size=shape.expert_intermediate,
        norm_topk_prob=True,
        tie_word_embeddings=name in TIED,
        mtp_num_layers=1,
        gate_activation="silu",
        dtype="bfloat16",
        max_position_embeddings=262144,
        eos_token_ids=(),
        quantized=quantized,
        four_bit_group=four_bit_group,
        scaled_codes=scaled_codes,
    )


def fill_random(parameters: Mapping[str, torch.Tensor]) -> None:
    """Fill weights with random numbers that keep activations finite, and gates as in a trained model."""
    for name, parameter in parameters.items():
        if name.endswith("a_log"):
            parameter.uniform_(-1.0, 2.0)
        elif name.endswith("dt_bias"):
            parameter.uniform_(-4.0, -1.0)
        elif parameter.dtype == torch.int16 and name.endswith("_scale"):
            _fill_scales(parameter, parameters[name.removesuffix("_scale")])
        elif parameter.dtype == torch.int16:
            parameter.random_(-(1 << 15), 1 << 15)
        elif parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("mixer.norm_weight") else 0.0)
        elif name.endswith("_scale") and parameters[name.removesuffix("_scale")].dtype == torch.int16:
            # Scale and zero point of each group [..., K / group, N, 2]; codes lie about 4 from zero points.
            # Codes have the mean 7.5: zero points of 8 and 7 in turn make that of the values zero. With
            # another mean all outputs are alike: texts repeat, and all rows choose the same experts.
            groups, rows, _ = parameter.shape[-3:]
            columns = 4 * parameters[name.removesuffix("_scale")].shape[-1]
            scales = torch.full((rows, groups), 0.7 * columns**-0.5 / 4, dtype=parameter.dtype)
            zeros = (8 - torch.arange(groups) % 2).expand(rows, groups)
            parameter.copy_(pack_groups(scales, zeros))
        elif name.endswith("_scale"):
            # One scale per block of 128 columns; FP8 values have about the size FP8_SIZE.
            parameter.fill_(0.7 * (128 * parameter.shape[-1]) ** -0.5 / FP8_SIZE)
        else:
            # Draw the first expert and copy it, rolled, to the others: temporaries stay one expert large.
            first = parameter if parameter.dim() == 2 else parameter[0]
            if first.dtype == torch.float8_e4m3fn:
                first.copy_(FP8_SIZE * torch.randn(first.shape, device=first.device))
            else:
                first.normal_(0.0, 0.7 * first.shape[-1] ** -0.5)
            if parameter.dim() == 3:
                # torch cannot roll FP8 on a GPU: roll bytes.
                whole = parameter.view(torch.uint8) if parameter.element_size() == 1 else parameter
                for index in range(1, parameter.shape[0]):
                    whole[index].copy_(whole[0].roll(index, 0))


def _fill_scales(scales: torch.Tensor, words: torch.Tensor) -> None:
    """Fill the scales of scaled codes with small numbers, whatever their kind."""
    if scales.dim() == 4:
        for one in zip(scales, words, strict=True):
            _fill_scales(*one)
        return
    if scales.dim() == 3 and scales.shape[2] == 2:
        # MXFP4: 2^-7.
        scales.fill_(0x7878)
        return
    # As float16 0.0002 to 0.0005, as e4m3 some 0.02, as scales of six bits and of bytes 12 to 16.
    scales.view(torch.uint8).random_(0x0C, 0x11)
    if scales.dim() == 3 and scales.shape[0] * 32 > words.shape[1]:
        # NVFP4: the factors of rows, in the first half of each block of the last unit.
        scales[-1].view(-1, 2, 32)[:, 0].view(torch.float32).fill_(0.2)


def rate_for(mean_new_tokens: float, mtp_step: int) -> float:
    """Return the acceptance rate r at which 1 + r + ... + r^mtp_step is `mean_new_tokens`.

    Raises ValueError if no rate gives it.
    """
    if not 1 <= mean_new_tokens <= mtp_step + 1:
        raise ValueError(f"accept must be from 1 to {mtp_step + 1} tokens per round, got {mean_new_tokens}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**k for k in range(mtp_step + 1)) < mean_new_tokens:
            low = middle
        else:
            high = middle
    return low
