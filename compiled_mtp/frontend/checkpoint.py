"""A checkpoint's front before its weights: what is wrong with a request is known without loading them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from compiled_mtp.config import HEAD_REMEDY, EngineConfig
from compiled_mtp.frontend.hub import find_checkpoint
from compiled_mtp.frontend.processor import Front
from compiled_mtp.frontend.tokenizer import Tokenizer, has_tokenizer
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.request import SamplingParams
from compiled_mtp.scheduler.limits import Limits

logger = logging.getLogger(__name__)


def open_front(config: EngineConfig) -> Front:
    """Find the checkpoint of `config`, download it if it must be, and return the front of its engine.

    It refuses the requests that the engine would; how many blocks there are is not known yet, and an Engine
    that is given the front sets its limits. Raises ValueError for a checkpoint, or a
    field of `config`, that does not fit.
    """
    path = find_checkpoint(Path(config.model), is_offline=config.offline)
    model_config = read_model_config(path)
    if config.settle(model_config, path).mtp_step != config.mtp_step:
        logger.warning(
            "mtp_step=auto is 0: %s stores no mtp.* tensors, as transformers saves fine-tunes; to draft, %s",
            path,
            HEAD_REMEDY,
        )
    # A default out of range is found before the weights are loaded.
    SamplingParams().with_defaults(model_config.generation_defaults)
    tokenizer = Tokenizer(path) if has_tokenizer(path) else None
    return make_front(config, path, model_config, tokenizer)


def make_front(
    config: EngineConfig, path: Path, model_config: ModelConfig, tokenizer: Tokenizer | None
) -> Front:
    """The front of a model that is known, with limits that hold until an engine sets its own."""
    limits = Limits(
        max_batch=config.max_batch,
        num_blocks=sys.maxsize,
        block_size=config.block_size,
        max_model_len=config.resolve_max_model_len(model_config),
        prefill_chunk=config.resolve_prefill_chunk("cpu", model_config),
        mtp_step=config.settle(model_config, path).depths[-1],
        max_in_flight=config.max_in_flight or 0,
    )
    return Front(path, model_config, tokenizer, limits)
