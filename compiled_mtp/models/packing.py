"""Which matrices of a CPU's engine are packed for its products."""

from __future__ import annotations

import logging

from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.row_unit import weights_of
from compiled_mtp.ops.packed_weight import pack

logger = logging.getLogger(__name__)


def pack_weights(target: TargetModel, draft: DraftModel | None) -> None:
    """Pack what `ops.packed_weight.pack` takes of the products of both models; the weights stay as they are.

    Values alone decide what is packed, so tokens do not depend on anything else.
    """
    weights = weights_of(target.modules())
    weights += [target.head_weight] if target.is_tied else []
    weights += weights_of(draft.modules()) if draft is not None else []
    packed = [weight for weight in weights if pack(weight)]
    if packed:
        size = sum(weight.numel() for weight in packed) * 2 >> 20
        logger.info(
            "%d of %d matrices are packed in half precision too, %d MiB", len(packed), len(weights), size
        )
