"""The NumPy specification against the operator, against transformers' processors, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_mtp.ops.features import RECENT_IDS
from compiled_mtp.ops.row_logprobs import row_logprobs
from compiled_mtp.ops.sample import sample
from compiled_mtp.ops.sample.reference import gumbel, philox
from tests.ops.sample_cases import arguments, make_case
from tests.sampling.numpy_sampling import (
    Rules,
    filtered,
    log_softmax,
    logprobs,
    noise,
    philox_words,
    processed,
    token,
)

VOCAB = 96
STOPS = (7, 11)
SINGLE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "bias": {"logit_bias": {3: 9.0, 50: -100.0}},
    "min_tokens": {"min_tokens": 12, "stop_ids": STOPS},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCAB, 3))},
    # A word of one id, and words of two ids, one for each id that may come first.
    "bad_words": {"bad_words": ((4,), *((v, w) for v in range(24) for w in (2, 3)))},
}
MIXES: dict[str, dict[str, Any]] = {
    "filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 2.0},
}
MIXES["all"] = {
    **MIXES["filters"],
    **MIXES["penalties"],
    **SINGLE["bias"],
    **SINGLE["min_tokens"],
    **SINGLE["allowed"],
    **SINGLE["bad_words"],
}


def random_request(seed: int) -> tuple[np.ndarray[Any, Any], list[int], list[int]]:
    """Return logits of a window of 4 rows, a prompt, and an output that ends with the window's 3 drafts."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(0, VOCAB, 20).tolist(), rng.integers(0, VOCAB // 4, 13).tolist()
    return (rng.standard_normal((4, VOCAB)) * 3).astype(np.float32), prompt, output


def engine_tokens(
    logits: np.ndarray[Any, Any], prompt: list[int], output: list[int], rules: Rules, num_valid_ids: int
) -> list[int]:
    """Return the operator's tokens for a window; its tables have the tokens emitted before the window."""
    emitted, drafts = output[:-3], output[-3:]
    start = len(prompt) + len(emitted)
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    counts[1] = torch.bincount(torch.tensor(emitted), minlength=VOCAB)
    seen = torch.zeros(2, VOCAB, dtype=torch.bool)
    seen[1, prompt] = True
    bias = torch.zeros(2, VOCAB)
    for token_id, value in rules.logit_bias.items():
        bias[1, token_id] = value
    if rules.allowed_token_ids is not None:
        is_left_out = torch.ones(VOCAB, dtype=torch.bool)
        is_left_out[list(rules.allowed_token_ids)] = False
        bias[1, is_left_out] = float("-inf")
    stops = torch.tensor([[-1, -1], [*rules.stop_ids, -1, -1][:2]])
    recent = torch.full((2, RECENT_IDS), -1)
    for position, token_id in enumerate(emitted, len(prompt)):
        recent[1, position % RECENT_IDS] = token_id
    case = make_case(
        torch.from_numpy(logits),
        tokens=torch.tensor([emitted[-1], *drafts]),
        positions=torch.arange(start, start + 4),
        temperature=rules.temperature,
        top_k=rules.top_k,
        top_p=rules.top_p,
        min_p=rules.min_p,
        repetition_penalty=rules.repetition_penalty,
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        seed=rules.seed,
        output_counts=counts,
        prompt_seen=seen,
        bias=bias,
        stop_ids=stops,
        min_position=len(prompt) + rules.min_tokens,
        num_valid_ids=num_valid_ids,
        bad_words=[[], [list(word) for word in rules.bad_words]],
        recent_ids=recent,
    )
    result: list[int] = sample(*arguments(case)).token.tolist()
    return result


@pytest.mark.parametrize("name", [*SINGLE, *MIXES])
def test_the_operator_equals_the_specification(name: str) -> None:
    """Every row of a window has its own prefix, with each of the operator's processors alone and mixed."""
    for seed in range(30):
        logits, prompt, output = random_request(seed)
        rules = Rules(**(SINGLE | MIXES)[name], seed=seed - 15)
        num_valid_ids = VOCAB - 2 * (seed % 2)
        expected = []
        for row in range(4):
            prefix = output[: len(output) - 3 + row]
            x = processed(logits[row], prompt, prefix, rules, num_valid_ids)
            expected.append(token(x, rules, len(prompt) + len(prefix)))
        assert engine_tokens(logits, prompt, output, rules, num_valid_ids) == expected


def test_noise_equals_the_operators() -> None:
    for seed, position in ((0, 0), (-3, 5), (2**62 + 9, 2**33 + 1)):
        words = philox(torch.tensor([[17]]), torch.tensor([seed]), torch.tensor([position]))
        assert words[0, 0].tolist() == philox_words(17, seed, position)
        theirs = gumbel(torch.tensor([seed]), torch.tensor([position]), 203)[0].double().numpy()
        np.testing.assert_allclose(noise(seed, position, 203), theirs, rtol=3e-7, atol=2e-7)


def transformers_scores(
    logits: np.ndarray[Any, Any], prompt: list[int], output: list[int], rules: Rules
) -> Any:
    """The same rules through transformers' processors, in their order, without bias."""
    steps: list[Any] = []
    if rules.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
    if rules.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(key,): value for key, value in rules.logit_bias.items()}))
    if rules.bad_words:
        steps.append(NoBadWordsLogitsProcessor([list(word) for word in rules.bad_words]))
    if rules.min_tokens:
        steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), rules.min_tokens, list(rules.stop_ids)))
    if rules.allowed_token_ids is not None:
        others = sorted(set(range(VOCAB)) - set(rules.allowed_token_ids))
        steps.append(SuppressTokensLogitsProcessor(others))
    if rules.temperature != 1:
        steps.append(TemperatureLogitsWarper(rules.temperature))
    if rules.top_k:
        steps.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p < 1:
        steps.append(TopPLogitsWarper(rules.top_p))
    if rules.min_p:
        steps.append(MinPLogitsWarper(rules.min_p))
    ids = torch.tensor([[*prompt, *output]])
    return LogitsProcessorList(steps)(ids, torch.from_numpy(logits)[None].double())[0].numpy()


@pytest.mark.parametrize(
    "fields",
    [
        SINGLE["temperature"],
        SINGLE["top_k"],
        SINGLE["top_p"],
        SINGLE["min_p"],
        SINGLE["repetition"],
        SINGLE["bias"],
        {"min_tokens": 20, "stop_ids": STOPS},
        SINGLE["min_tokens"],
        {"allowed_token_ids": (2, 3, 5, 7)},
        {"bad_words": ((5,), (1, 2), (3, 4, 6))},
        MIXES["filters"],
        {
            **MIXES["filters"],
            "repetition_penalty": 1.2,
            "min_tokens": 20,
            "stop_ids": STOPS,
            "bad_words": ((5,), (1, 2)),
        },
        {
            "allowed_token_ids": tuple(range(30)),
            "top_p": 0.8,
            "bad_words": ((1, 2), (9,)),
            "repetition_penalty": 0.9,
        },
    ],
    ids=lambda fields: " ".join(fields),
)
def test_transformers_agrees(fields: dict[str, Any]) -> None:
    for seed in range(20):
        logits, prompt, output = random_request(seed)
        rules = Rules(**fields)
        if seed % 2:
            output = [*output[:-2], 3, 4]  # The beginning of a bad word.
        mine = filtered(processed(logits[0], prompt, output, rules), rules)
        theirs = transformers_scores(logits[0], prompt, output, rules)
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def finite_ids(x: Any) -> list[int]:
    return np.nonzero(np.isfinite(x))[0].tolist()


def test_penalties_count_drafts_and_only_repetition_counts_the_prompt() -> None:
    logits = [2.0, -2.0, 1.0, 4.0]
    rules = Rules(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert processed(logits, [0, 1], [], rules).tolist() == [1.0, -4.0, 1.0, 4.0]
    assert processed(logits, [0, 1], [0, 3, 3], rules).tolist() == [0.25, -4.0, 1.0, 1.0]


def test_min_tokens_bad_words_and_masks() -> None:
    logits = np.zeros(6)
    rules = Rules(min_tokens=2, stop_ids=(4,), bad_words=((5,), (1, 2), (1, 1, 3)))
    assert finite_ids(processed(logits, [1], [], rules)) == [0, 1, 2, 3]
    assert finite_ids(processed(logits, [1, 1], [0, 1], rules)) == [0, 1, 3, 4]
    assert finite_ids(processed(logits, [], [1, 1], rules)) == [0, 1, 4]
    grammar = [True, False, True, True, True, True]
    allowed = replace(rules, allowed_token_ids=(1, 2, 3))
    assert finite_ids(processed(logits, [], [0, 0], allowed, 3, grammar)) == [2]
    assert token(processed(logits, [], [0, 0], allowed, 2, grammar), allowed, 9) == -1


def test_ties_are_kept_by_filters_and_broken_by_the_lowest_id() -> None:
    logits = np.array([0.0, 3.0, 1.0, 3.0, 3.0, 1.0])
    assert finite_ids(filtered(logits, Rules(top_k=2))) == [1, 3, 4]
    assert finite_ids(filtered(logits, Rules(top_k=4))) == [1, 2, 3, 4, 5]
    assert finite_ids(filtered(logits, Rules(top_p=0.4))) == [1, 3, 4]
    assert finite_ids(filtered(logits, Rules(top_p=0.0))) == [1, 3, 4]
    assert finite_ids(filtered(logits, Rules(min_p=0.2))) == [1, 3, 4]
    assert token(logits, Rules(temperature=0.0), 0) == 1
    # A greedy request ignores filters.
    assert finite_ids(filtered(logits, Rules(temperature=0.0, top_k=1))) == list(range(6))


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert finite_ids(filtered(logits, Rules(top_p=0.55))) == [0, 1]
    assert finite_ids(filtered(logits, Rules(top_p=0.55, top_k=2))) == [0]


def test_logprobs_rank_and_list_ties_by_the_lowest_id() -> None:
    logits = [1.0, 2.0, 2.0, float("-inf"), 0.0]
    own = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).tolist()
    entry = logprobs(logits, 2, 20)
    assert entry.rank == 2
    assert entry.logprob == pytest.approx(own[2], abs=1e-12)
    assert [token_id for token_id, _ in entry.top] == [1, 2, 0, 4]
    assert logprobs(logits, 4, 2).top == [(1, pytest.approx(own[1])), (2, pytest.approx(own[2]))]
    assert logprobs(logits, 3, 0) == (-np.inf, 5, [])
    rules = Rules(temperature=0.5, top_k=1)
    assert logprobs(filtered(np.array(logits), rules), 1, 5).top == [(1, np.log(0.5)), (2, np.log(0.5))]
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1)


def test_raw_logprobs_equal_the_operators() -> None:
    logits, _, _ = random_request(3)
    chosen = torch.arange(len(logits))
    theirs = row_logprobs(torch.from_numpy(logits), chosen, VOCAB)
    for row, value in enumerate(theirs.logprob.tolist()):
        assert logprobs(logits[row], row, 0).logprob == pytest.approx(value, abs=2e-6)
