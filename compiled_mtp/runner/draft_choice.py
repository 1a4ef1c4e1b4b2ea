"""Which head drafts read, as the config asks for it."""

from __future__ import annotations

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import fail
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.draft_head import DraftHeadPlan
from compiled_mtp.models.draft_vocabulary import choose_draft_ids
from compiled_mtp.ops.fp8 import converts_fp8


def plan_draft_head(
    config: EngineConfig, model: ModelConfig, num_valid_ids: int, device: torch.device, mtp_step: int
) -> DraftHeadPlan:
    """What config.draft_vocab and draft_head_dtype ask for, of rounds of at most mtp_step drafts.

    Raises ValueError for a file of ids that does not fit, and for FP8 on a GPU that cannot convert it.
    """
    ids = choose_draft_ids(config.draft_vocab, num_valid_ids, model.eos_token_ids)
    is_fp8 = config.draft_head_dtype != "auto"
    if is_fp8 and device.type == "cuda" and not converts_fp8(device):
        remedy = "its kernels need compute capability 8.9, pass auto"
        raise fail("draft_head_dtype", "be auto on this GPU", config.draft_head_dtype, remedy)
    return DraftHeadPlan(ids, is_fp8) if mtp_step else DraftHeadPlan(None, False)
