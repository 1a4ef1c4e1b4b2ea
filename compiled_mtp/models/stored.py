"""Corrects config.json by the stored tensors: in fine-tunes the two often differ."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from compiled_mtp.errors import check, shown
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import FP8

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Rows that are compared at a time: the two tables of a released model take gigabytes.
_ROWS = 4096


def as_stored(config: ModelConfig, root: Path) -> ModelConfig:
    """Return `config` corrected by the tensors in `root`; unchanged for a folder without *.safetensors.

    mtp_num_layers becomes 1 if an MTP head is stored, else 0. Using a head that config.json does not name is
    safe, because a draft changes no token; transformers saves fine-tunes without a head that config.json
    names. tie_word_embeddings becomes False if a stored head differs from the embedding, as in transformers
    5. quantized becomes True if FP8 weights in blocks are stored. Raises ValueError for an adapter, and as
    `read_stored` does.
    """
    adapter = root / "adapter_config.json"
    remedy = "move the adapter to a directory of its own and pass that as lora"
    check(not adapter.is_file(), "model", "be a directory without an adapter", shown(adapter), remedy)
    if not any(root.glob("*.safetensors")):
        return config
    headers = read_stored(root)
    # Whatever quantization method config.json names, if any.
    if not config.quantized and any(name.endswith(FP8.scale_suffix) for name in headers):
        config = replace(config, quantized=True)
    has_head = any(name.startswith("mtp.") for name in headers)
    if has_head and not config.mtp_num_layers:
        logger.info("config.json of %s names no MTP head; the one that is stored is used", root)
    config = replace(config, mtp_num_layers=int(has_head))
    if not config.tie_word_embeddings or not {EMBEDDING, HEAD} <= headers.keys():
        return config
    if are_equal(headers[EMBEDDING], headers[HEAD]):
        logger.info("%s is the embedding once more; it is skipped", headers[HEAD].name)
        return config
    logger.warning(
        "config.json of %s ties the head to the embedding, but %s differs from it: it is used as the head",
        root,
        headers[HEAD].name,
    )
    return replace(config, tie_word_embeddings=False)


def are_equal(first: StoredWeight, second: StoredWeight) -> bool:
    """Whether two matrices hold equal numbers, which are compared some rows at a time."""
    if first.shape != second.shape or len(first.shape) != 2:
        return False
    for begin in range(0, first.shape[0], _ROWS):
        rows = slice(begin, min(begin + _ROWS, first.shape[0]))
        # torch cannot compare FP8 tensors.
        parts = [weight.read((rows, slice(0, weight.shape[1]))).float() for weight in (first, second)]
        if not torch.equal(*parts):
            return False
    return True
