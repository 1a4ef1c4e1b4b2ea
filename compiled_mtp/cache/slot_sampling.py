"""Writes a request's sampling parameters into the rows of its slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from compiled_mtp.cache.slot_tensors import SlotTensors
from compiled_mtp.ops.features import BAD_WORDS, BIAS, PENALTIES, RECENT_IDS, STOP_IDS
from compiled_mtp.plan import Admit, SlotSampling

MAX_STOP_IDS = MAX_BAD_WORDS = 64
# Fields of SlotSampling that have a slot tensor of the same name: those that every draw reads, and those that
# a draw reads only with their bit of `features`.
_ALWAYS = ("seed", "temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies a fresh host tensor to the device, without waiting for the copy."""


def features_of(sampling: SlotSampling) -> int:
    """Return the bits of the features that a request uses."""
    neutral = (1.0, 0.0, 0.0)
    wanted = {
        PENALTIES: tuple(getattr(sampling, name) for name in _PENALTIES) != neutral,
        BIAS: bool(sampling.bias) or sampling.allowed_ids is not None,
        STOP_IDS: sampling.min_position > 0 and bool(sampling.stop_ids),
        BAD_WORDS: bool(sampling.bad_words),
    }
    return sum(bit for bit, is_wanted in wanted.items() if is_wanted)


def write_sampling(rows: SlotTensors, admitted: Sequence[Admit], upload: Upload) -> None:
    """Write the admitted requests' parameters, and the tables that they use. Mutates `rows`."""
    every = [move.sampling for move in admitted]
    slots = upload(torch.tensor([move.slot for move in admitted], dtype=torch.int64))
    columns = {name: [getattr(sampling, name) for sampling in every] for name in _ALWAYS}
    columns["features"] = [features_of(sampling) for sampling in every]
    for name, values in columns.items():
        rows[name][slots] = upload(torch.tensor(values, dtype=rows[name].dtype))
    for move, features in zip(admitted, columns["features"], strict=True):
        if features:
            _write_tables(rows, move.slot, move.sampling, features, upload)
        if forced := move.sampling.forced_ids:
            begin = move.sampling.forced_position
            to = rows["forced_ids"][move.slot, begin : begin + len(forced)]
            to.copy_(upload(torch.tensor(forced, dtype=torch.int32)))


def _write_tables(
    rows: SlotTensors, slot: int, sampling: SlotSampling, features: int, upload: Upload
) -> None:
    """Write the tables of one slot that `features` name; nothing reads the others."""

    def ids(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int64))

    if features & PENALTIES:
        for name in _PENALTIES:
            rows[name][slot] = getattr(sampling, name)
        rows["output_counts"][slot] = 0
        rows["prompt_seen"][slot] = False
        if sampling.prompt_ids:
            rows["prompt_seen"][slot].index_fill_(0, ids(sampling.prompt_ids), True)
    if features & BIAS:
        bias = rows["bias"][slot]
        bias.fill_(0.0 if sampling.allowed_ids is None else -math.inf)
        if sampling.allowed_ids:
            bias.index_fill_(0, ids(sampling.allowed_ids), 0.0)
        if sampling.bias:
            added = torch.tensor([value for _, value in sampling.bias], dtype=torch.float32)
            bias.index_add_(0, ids([token_id for token_id, _ in sampling.bias]), upload(added))
    if features & STOP_IDS:
        rows["min_position"][slot] = sampling.min_position
        missing = MAX_STOP_IDS - len(sampling.stop_ids)
        rows["stop_ids"][slot] = ids([*sampling.stop_ids, *[-1] * missing])
    if features & BAD_WORDS:
        words: list[tuple[int, ...]] = list(sampling.bad_words) + [()] * (
            MAX_BAD_WORDS - len(sampling.bad_words)
        )
        rows["bad_words"][slot] = ids([[*word, *[-1] * (RECENT_IDS - len(word))] for word in words])
        rows["bad_word_lengths"][slot] = ids([len(word) for word in words]).to(torch.int32)
        rows["recent_ids"][slot] = -1
