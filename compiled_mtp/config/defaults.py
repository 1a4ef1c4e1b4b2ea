"""The numbers that a config leaves to the device ("cpu" or "cuda") and the model."""

from __future__ import annotations

from typing import Literal

from compiled_mtp.config.engine_config import (
    BUSY_CHUNK,
    CPU_CHUNK,
    GPU_CHUNK,
    NARROW,
    NARROW_CHUNK,
    EngineConfig,
)
from compiled_mtp.errors import check, fail
from compiled_mtp.model_config import ModelConfig

# Up to this many rows a GPU takes longer to read 27B's weights than to multiply by them.
_ROWS_FOR_NOTHING = 256


def resolve_dtype(config: EngineConfig, device: str, model: ModelConfig) -> Literal["float32", "bfloat16"]:
    """Return the dtype of weights and activations. Raises ValueError for a checkpoint of another dtype."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu" or model.dtype == "float32":
        return "float32"
    if model.dtype == "bfloat16":
        return "bfloat16"
    got = f"{model.dtype} from the checkpoint"
    raise fail("dtype", "be float32 or bfloat16", got, "pass dtype='bfloat16'")


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most tokens of one request. Raises ValueError for more than the checkpoint's limit."""
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    rule = f"be at most {limit}, the checkpoint's limit"
    check(config.max_model_len <= limit, "max_model_len", rule, config.max_model_len, "lower it")
    return config.max_model_len


def resolve_prefill_chunk(config: EngineConfig, device: str, model: ModelConfig) -> int:
    """Return the most tokens of a prompt per launch."""
    if config.prefill_chunk is not None:
        return config.prefill_chunk
    if device == "cpu":
        return _whole_steps(config, CPU_CHUNK)
    return _whole_steps(config, NARROW_CHUNK if model.hidden_size <= NARROW else GPU_CHUNK)


def resolve_busy_chunk(config: EngineConfig, device: str, model: ModelConfig) -> int:
    """Return the most tokens of a prompt per launch while other requests decode."""
    if config.prefill_chunk is not None or device == "cpu":
        return resolve_prefill_chunk(config, device, model)
    return _whole_steps(config, BUSY_CHUNK)


def resolve_least_saved(device: str) -> int:
    """Return the fewest tokens that a state snapshot near a prompt's end must save the same prompt.

    On a GPU a launch without fewer tokens takes as long, and the snapshot would evict another one.
    """
    return _ROWS_FOR_NOTHING if device == "cuda" else 0


def resolve_max_in_flight(config: EngineConfig, device: str) -> int:
    """Return the steps launched before the last result is read."""
    return config.max_in_flight if config.max_in_flight is not None else int(device == "cuda")


def _whole_steps(config: EngineConfig, num_tokens: int) -> int:
    return max(1, num_tokens // config.resume_step) * config.resume_step
