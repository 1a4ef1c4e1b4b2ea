"""The rotary embedding: frequencies, rope scaling, and the table that every attention layer reads.

Source: modeling_rope_utils.py of Hugging Face transformers 5; YaRN: Peng et al., arXiv 2309.00071.
"""

from __future__ import annotations

import math

import torch

from compiled_mtp.model_config import ModelConfig, RopeScaling


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> torch.Tensor:
    """[length, rotary_dim] float32: the cosines, then the sines, of position times frequency.

    With rope scaling, both are multiplied by its attention factor.
    """
    angles = torch.arange(length).float()[:, None] * _frequencies(config)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if config.rope_scaling is not None:
        table *= config.rope_scaling.attention_factor
    return table.to(device)


def _frequencies(config: ModelConfig) -> torch.Tensor:
    """[rotary_dim / 2] float32: theta^(-2j / rotary_dim), scaled."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    periods = config.rope_theta**exponent
    plain, scaling = 1.0 / periods, config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    # YaRN keeps the frequencies that turn often within the original length, divides by the factor those that
    # turn seldom, and blends the ones between.
    kept = 1 - _ramp(config, scaling)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + plain * kept


def _ramp(config: ModelConfig, scaling: RopeScaling) -> torch.Tensor:
    """[rotary_dim / 2] float32, rising from 0, where a frequency is kept, to 1, where it is divided."""
    first, last = (_index_at(config, scaling, turns) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    if first == last:
        last += 0.001
    index = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    return ((index - first) / (last - first)).clamp(0, 1)


def _index_at(config: ModelConfig, scaling: RopeScaling, turns: float) -> float:
    """The index, not rounded, of the frequency that makes `turns` turns within the original length."""
    period = math.log(scaling.original_length / (turns * 2 * math.pi))
    return config.rotary_dim * period / (2 * math.log(config.rope_theta))
