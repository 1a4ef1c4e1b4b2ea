"""Opens a checkpoint's request processor without its weights, so that wrong requests fail early."""

from __future__ import annotations

import logging
from pathlib import Path

from compiled_mtp.config.defaults import resolve_max_model_len
from compiled_mtp.config.engine_config import HEAD_REMEDY, EngineConfig
from compiled_mtp.frontend.hub import find_checkpoint
from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.frontend.tokenizer import Tokenizer, has_tokenizer
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.request import SamplingParams

logger = logging.getLogger(__name__)


def open_frontend(config: EngineConfig) -> RequestProcessor:
    """Find the checkpoint of `config`, download it if needed, and return its engine's request processor.

    The processor refuses the requests that the engine would, except those that do not fit into all blocks,
    whose number is not yet known. Raises ValueError for an unusable checkpoint or field of `config`.
    """
    path = find_checkpoint(Path(config.model), is_offline=config.offline)
    model_config = read_model_config(path, max_pixels=config.vision_pixels)
    if config.settle(model_config, path).mtp_step != config.mtp_step:
        logger.warning(
            "mtp_step=auto is 0: %s stores no mtp.* tensors, as transformers saves fine-tunes; to draft, %s",
            path,
            HEAD_REMEDY,
        )
    # Find a default out of range before the weights are loaded.
    SamplingParams().with_defaults(model_config.generation_defaults)
    tokenizer = Tokenizer(path, config.chat_template) if has_tokenizer(path) else None
    longest = resolve_max_model_len(config, model_config)
    return RequestProcessor(path, model_config, tokenizer, longest, config.max_images)
