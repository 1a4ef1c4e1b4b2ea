"""`sample` on a CPU: a short path if all requests are greedy without processors, else the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_mtp.ops.features import BAD_WORDS, BIAS, DRAWN, PENALTIES, STOP_IDS
from compiled_mtp.ops.sample.reference import GREEDY_TEMPERATURE, Sampled, SamplingTables
from compiled_mtp.ops.sample.reference import sample as specification

# GREEDY_TEMPERATURE as the float32 table holds it.
_GREEDY = float(torch.tensor(GREEDY_TEMPERATURE, dtype=torch.float32))
_PROCESSED = PENALTIES | BIAS | STOP_IDS | BAD_WORDS


def sample(
    logits: Tensor,
    drafts: Tensor,
    positions: Tensor,
    state_index: Tensor,
    tables: SamplingTables,
    num_valid_ids: int,
    column_ids: Tensor | None,
    masks: Tensor | None,
) -> Sampled:
    if column_ids is None and masks is None and _are_greedy(state_index, tables):
        valid = logits[:, :num_valid_ids]
        # A sum is finite only if all of its terms are.
        if all(map(math.isfinite, valid.sum(-1).tolist())):
            return Sampled(valid.argmax(-1), torch.full((len(logits),), DRAWN, dtype=torch.uint8))
    arguments = (logits, drafts, positions, state_index, tables, num_valid_ids, column_ids, masks)
    return specification.reference(*arguments)


def _are_greedy(state_index: Tensor, tables: SamplingTables) -> bool:
    """Return whether every request is greedy and has no processor."""
    temperatures, features = tables.temperature.tolist(), tables.features.tolist()
    return all(
        temperatures[slot] < _GREEDY and not features[slot] & _PROCESSED for slot in state_index.tolist()
    )
