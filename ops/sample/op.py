"""Registration of `sample` and the checks on its arguments."""

from __future__ import annotations

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.registry import register
from compiled_mtp.ops.sample import reference

_TABLE = "pass the sampler's parameter tables, one row a slot"


def _fake(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    state_index: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    bias: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    num_valid_ids: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)


def _launch(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    state_index: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    bias: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    num_valid_ids: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    from compiled_mtp.ops.sample.kernel import launch

    return launch(
        logits,
        tokens,
        positions,
        state_index,
        temperature,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        top_k,
        seed,
        output_counts,
        prompt_seen,
        bias,
        min_position,
        stop_ids,
        num_valid_ids,
    )


def _check_sample(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    state_index: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    bias: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    num_valid_ids: int,
) -> None:
    check_dtype("logits", logits, (torch.float32,), "pass float32 logits")
    check_shape("logits", logits, (None, None), "pass one row of logits for each token to draw")
    check_last_contiguous("logits", logits)
    rows, vocab = logits.shape
    check_shape("state_index", state_index, (None,), "pass one slot for each request")
    check_dtype("state_index", state_index, (torch.int32,), "cast it to int32")
    check_last_contiguous("state_index", state_index)
    requests = state_index.shape[0]
    if requests == 0 or rows % requests:
        raise fail("logits", f"have a multiple of {requests} rows", rows, "pad whole requests")
    for name, row_table in (("tokens", tokens), ("positions", positions)):
        check_shape(name, row_table, (rows,), "pass one entry for each row of logits")
        check_dtype(name, row_table, (torch.int64,), "cast it to int64")
        check_last_contiguous(name, row_table)
    slots = temperature.shape[0]
    for name, table, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("repetition_penalty", repetition_penalty, torch.float32),
        ("presence_penalty", presence_penalty, torch.float32),
        ("frequency_penalty", frequency_penalty, torch.float32),
        ("top_k", top_k, torch.int32),
        ("seed", seed, torch.int64),
        ("min_position", min_position, torch.int64),
    ):
        check_shape(name, table, (slots,), _TABLE)
        check_dtype(name, table, (dtype,), _TABLE)
        check_last_contiguous(name, table)
    for name, table, dtype, width in (
        ("output_counts", output_counts, torch.int32, vocab),
        ("prompt_seen", prompt_seen, torch.bool, vocab),
        ("bias", bias, torch.float32, vocab),
        ("stop_ids", stop_ids, torch.int64, None),
    ):
        if table.dim() != 2 or table.shape[0] != 0:
            check_shape(name, table, (slots, width), "give it one row a slot, or a first dimension of 0")
        check_dtype(name, table, (dtype,), _TABLE)
        check_last_contiguous(name, table)
    if not 0 < num_valid_ids <= vocab:
        raise fail("num_valid_ids", f"be in 1..{vocab}", num_valid_ids, "pass the tokenizer's number of ids")


_sample = register("sample", reference.sample, _fake, launch=_launch, check=_check_sample)


def sample(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    state_index: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    bias: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    num_valid_ids: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the token of every row under noise keyed by (seed, position, id), independent of the other rows.

    `logits` [M, V] f32 with M = B*W rows, request-major; `tokens` [M] i64, the input token of each row;
    `positions` [M] i64, the absolute position of the token to draw; `state_index` [B] i32, a request's slot.
    Tables with a row a slot: `temperature`, `top_p` (>= 1 is off), `min_p` (0 is off), `repetition_penalty`,
    `presence_penalty`, `frequency_penalty` [slots] f32, `top_k` [slots] i32 (0 is off), `seed` and
    `min_position` [slots] i64, `output_counts` [slots, V] i32, `prompt_seen` [slots, V] bool, `bias`
    [slots, V] f32, `stop_ids` [slots, n] i64 (-1 is none); a first dimension of 0 in one of the last four
    switches it off. Returns token [M] i64 and logprob [M] f32, the log-softmax of the raw logits at it.

    Order: repetition penalty (prompt and output), presence, frequency (output only), bias, masks (`stop_ids`
    while position < min_position; ids >= `num_valid_ids`), / temperature, top-k (ties with the threshold
    stay), top-p (likewise), min-p, + noise, argmax, lowest id on ties. A temperature below 1e-5 is greedy: no
    noise, no filter. Row k of a window also counts the drafts tokens[b*W+1 .. b*W+k] as output. A logit that
    is not finite counts as -inf; a row with nothing finite left gives token 0 (logprob -inf where no raw
    logit is finite). Mutates nothing; raises ValueError on shapes and dtypes.
    Source of the rule: Daliri, Musco, Suresh, arXiv 2408.07978.
    """
    return _sample(
        logits,
        tokens,
        positions,
        state_index,
        temperature,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        top_k,
        seed,
        output_counts,
        prompt_seen,
        bias,
        min_position,
        stop_ids,
        num_valid_ids,
    )
