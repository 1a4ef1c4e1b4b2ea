"""sample: noise, distribution, processors, ties, invariance, kernel and registration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compiled_mtp.ops.features import (
    ALL_MASKED,
    BAD_WORDS,
    BIAS,
    DRAWN,
    NOT_FINITE,
    PENALTIES,
    RECENT_IDS,
    STOP_IDS,
)
from compiled_mtp.ops.sample import Sampled, sample
from compiled_mtp.ops.sample.reference import gumbel, philox
from tests.ops.harness import assert_same_bits, check_compiles, check_registration
from tests.ops.sample_cases import (
    Case,
    arguments,
    full_case,
    in_columns,
    make_case,
    numpy_noise,
    numpy_philox,
    numpy_scores,
    numpy_token,
    pack_masks,
    part_of,
)


def draw(case: Case) -> Sampled:
    return sample(*arguments(case))


def signed(low: int, high: int) -> int:
    return (high << 32 | low) - ((high >> 31) << 64)


def test_philox_known_answers() -> None:
    # The known answers published with the algorithm (Random123, kat_vectors, philox 4x32 10).
    known = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, words in known:
        assert [int(word) for word in numpy_philox(counter, key)] == words
    generator = np.random.default_rng(0)
    for _ in range(50):
        block, seed_low, seed_high, low, high = (int(v) for v in generator.integers(0, 1 << 32, 5))
        seed, position = torch.tensor([signed(seed_low, seed_high)]), torch.tensor([signed(low, high)])
        words = numpy_philox([block, 0, low, high], [seed_low, seed_high])
        assert philox(torch.tensor([[block]]), seed, position)[0, 0].tolist() == [int(w) for w in words]


def test_noise_equals_numpy_and_does_not_depend_on_how_it_is_asked_for() -> None:
    seed, position = torch.tensor([-3, 1 << 40]), torch.tensor([5, 1 << 33])
    noise = gumbel(seed, position, 1003)
    for row in range(2):
        exact = numpy_noise(int(seed[row]), int(position[row]), 1003)
        torch.testing.assert_close(noise[row].double(), torch.from_numpy(exact), rtol=3e-7, atol=2e-7)
    ids = torch.tensor([[0, 3, 4, 1002], [7, 6, 5, 999]])
    assert torch.equal(gumbel(seed, position, 1003, ids), noise.gather(1, ids))


def test_noise_has_the_gumbel_distribution_in_both_tails() -> None:
    samples = 1 << 22
    noise = torch.cat(
        [gumbel(torch.tensor([seed]), torch.tensor([9]), samples // 8)[0] for seed in range(8)]
    ).double()
    assert noise.isfinite().all()
    for probability in (1e-6, 1e-5, 1e-4, 1e-2, 0.1, 0.5):
        expected = samples * probability
        lower, upper = -np.log(-np.log(probability)), -np.log(-np.log1p(-probability))
        for count in (int((noise < lower).sum()), int((noise > upper).sum())):
            assert abs(count - expected) < 4 * np.sqrt(expected * (1 - probability)) + 1


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    logits = torch.randn(6, 1000)
    logits[2, 100] = logits[2, 900] = 50.0
    token = draw(make_case(logits, 2)).token
    assert torch.equal(token, logits.argmax(-1))
    assert token[2] == 100


@pytest.mark.parametrize("vocab, query_len", [(37, 1), (37, 4), (300, 3)])
def test_every_processor_equals_numpy(vocab: int, query_len: int) -> None:
    case = full_case(vocab, query_len)
    for kept in (*range(16), 31):
        some = case | {"features": case["features"] & kept}
        if kept < 16:
            some["masks"] = None
        token, _ = draw(some)
        assert token.tolist() == [numpy_token(some, row) for row in range(len(token))]


def test_full_vocabulary_equals_numpy() -> None:
    vocab = 248320
    logits = torch.randn(5, vocab) * 3
    case = make_case(
        logits,
        5,
        temperature=[0.0, 1.0, 1.0, 0.8, 1.0],
        top_k=[0, 0, 20, 0, 0],
        top_p=[1.0, 1.0, 0.95, 0.9, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.01],
        num_valid_ids=248077,
    )
    assert draw(case).token.tolist() == [numpy_token(case, row) for row in range(5)]


def chi_square_score(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return (chi-square - its mean) / its standard deviation; tokens of probability 0 must not occur."""
    assert int(counts[probabilities == 0].sum()) == 0
    expected = probabilities[probabilities > 0] * counts.sum()
    freedom = len(expected) - 1
    statistic = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5 if freedom else 0.0


def test_tokens_have_the_specified_distribution() -> None:
    # Neighbours in one call differ in every parameter, one of them is greedy; each row has its own logits.
    parameters: list[dict[str, float]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.2, "top_k": 6, "top_p": 0.85, "min_p": 0.05},
    ]
    kinds, query_len, vocab, repeats = len(parameters), 2, 12, 3000
    logits = torch.randn(kinds * query_len, vocab) * 1.5
    tables = {
        name: [p.get(name, {"top_p": 1.0}.get(name, 0.0)) for p in parameters] * repeats
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    case = make_case(
        logits.repeat(repeats, 1),
        kinds * repeats,
        positions=torch.arange(kinds * query_len * repeats),
        seed=torch.arange(kinds * repeats) // (kinds * 100),
        **tables,
    )
    token, _ = draw(case)
    by_row = token.view(repeats, kinds * query_len)
    for row in range(kinds * query_len):
        counts = torch.bincount(by_row[:, row], minlength=vocab).double()
        scores, is_random = numpy_scores(case, row)
        if not is_random:
            assert int(counts[int(scores.argmax())]) == repeats
            continue
        weight = np.exp(scores - scores.max())
        assert chi_square_score(counts, torch.from_numpy(weight / weight.sum())) < 4


def test_drafts_of_the_window_count_as_output() -> None:
    logits = torch.zeros(9, 8)
    logits[:, 3], logits[:, 5] = 2.0, 1.5
    tokens = torch.tensor([0, 3, 3, 0, 5, 3, 0, 1, 2])
    counts = torch.zeros(4, 8, dtype=torch.int32)
    case = make_case(logits, 3, tokens=tokens, output_counts=counts, presence_penalty=[1.0, 1.0, 0.0])
    # Row 0 of a window counts no draft, row k the first k drafts; the third request has no penalty.
    assert draw(case)[0].tolist() == [3, 5, 5, 3, 3, 3, 3, 3, 3]
    case = make_case(logits, 3, tokens=tokens, output_counts=counts, frequency_penalty=[0.3, 1.0, 0.0])
    assert draw(case)[0].tolist() == [3, 3, 5, 3, 3, 3, 3, 3, 3]
    assert not counts.any()


def test_processors_apply_in_order() -> None:
    logits = torch.tensor([[4.0, 3.0, 0.5, -1.0]])
    base = {"output_counts": torch.tensor([[1, 0, 0, 0]] * 2, dtype=torch.int32)}
    # 4 / 2 - 0.9 = 1.1; in the other order, (4 - 0.9) / 2 = 1.55 would win over 1.3.
    base |= {"bias": torch.tensor([[0.0, -1.7, 0.0, 0.0]] * 2), "stop_ids": torch.tensor([[-1, -1]] * 2)}
    case = make_case(logits, repetition_penalty=2.0, presence_penalty=0.9, **base)
    assert int(draw(case)[0]) == 1
    # The mask comes after the bias, and ends at min_position.
    case["bias"][:, 2] = 100.0
    case["stop_ids"] = torch.tensor([[2, -1]] * 2)
    case["min_position"] = torch.tensor([11, 11])
    assert int(draw(case)[0]) == 1
    case["min_position"] = torch.tensor([10, 10])
    assert int(draw(case)[0]) == 2
    case["num_valid_ids"] = 2
    assert int(draw(case)[0]) == 1


def test_filters_keep_ties_and_at_least_the_peak() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 1.0, 0.0]]).expand(400, 5).contiguous()
    ties = make_case(logits, 400, temperature=1.0, top_k=1, positions=torch.arange(400))
    assert sorted(set(draw(ties)[0].tolist())) == [0, 1, 2]
    ties = make_case(logits, 400, temperature=1.0, top_p=0.01, positions=torch.arange(400))
    assert sorted(set(draw(ties)[0].tolist())) == [0, 1, 2]
    logits = torch.tensor([[2.0, 1.9, 1.8, 1.0, 0.0]]).expand(400, 5).contiguous()
    peak = make_case(logits, 400, temperature=1.0, top_p=0.0, positions=torch.arange(400))
    assert draw(peak)[0].tolist() == [0] * 400


def test_rows_without_a_finite_logit_give_token_zero() -> None:
    logits = torch.full((6, 9), float("nan"))
    logits[1] = float("-inf")
    logits[2] = float("inf")
    logits[3, 4:] = 1.0
    logits[4] = 1.0
    case = make_case(logits, 6, temperature=[1.0, 0.0, 1.0, 0.0, 0.0, 1.0], top_k=[0, 0, 3, 0, 0, 0])
    token, outcome = draw(case | {"num_valid_ids": 4})
    assert token.tolist() == [0] * 6
    assert outcome.tolist() == [NOT_FINITE] * 4 + [DRAWN, NOT_FINITE]


def test_a_row_with_every_id_masked_says_so() -> None:
    case = make_case(torch.zeros(4, 40), 4, temperature=[0.0, 1.0, 1.0, 1.0], top_k=[0, 0, 3, 0])
    allowed = torch.zeros(4, 40, dtype=torch.bool)
    allowed[3, 33] = True
    token, outcome = draw(case | {"masks": pack_masks(allowed)})
    assert token.tolist() == [0, 0, 0, 33]
    assert outcome.tolist() == [ALL_MASKED] * 3 + [DRAWN]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_is_finite_if_its_raw_logits_at_valid_ids_are(value: float) -> None:
    logits = torch.randn(4, 9)
    logits[1, 5], logits[2, 6], logits[3, 0] = value, value, value
    case = make_case(
        logits, 4, num_valid_ids=6, temperature=[0.0, 1.0, 1.0, 0.0], bias=torch.full((5, 9), float("-inf"))
    )
    # Columns after the valid ids may hold any value; only raw logits decide, not what processors add.
    assert draw(case).outcome.tolist() == [ALL_MASKED, NOT_FINITE, ALL_MASKED, NOT_FINITE]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("vocab", [37, 4099])
def test_rows_do_not_depend_on_other_rows(threads: int, vocab: int) -> None:
    case = full_case(vocab, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = draw(case)
        for requests in (1, 4):
            parts = [draw(part_of(case, first, requests)) for first in range(0, 12, requests)]
            assert_same_bits([torch.cat(column) for column in zip(*parts, strict=True)], together)
    finally:
        torch.set_num_threads(before)


def test_a_permuted_head_draws_the_same_ids() -> None:
    case = full_case(300, 3)
    # The filters then sum in another order: no value may lie near a threshold.
    columns = torch.randperm(300)
    assert_same_bits(draw(in_columns(case, columns)), draw(case))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_chain_samples_as_a_window_does(is_cut: bool) -> None:
    """Three routes: a window; single rows with the drafts before them; single rows with the drafts in the
    tables."""
    case = full_case(300, 4)
    if is_cut:
        case = in_columns(case, torch.randperm(300)[:120])
    together = draw(case)
    for k in range(4):
        chained = case | {
            "logits": case["logits"][k::4],
            "drafts": case["drafts"][:, :k],
            "positions": case["positions"][k::4].contiguous(),
            "masks": case["masks"][k::4],
        }
        assert_same_bits(draw(chained), [t[k::4] for t in together])
        committed = chained | {name: case[name].clone() for name in ("output_counts", "recent_ids")}
        committed["drafts"] = case["drafts"][:, :0]
        for b in range(12):
            for i in range(k):
                committed["output_counts"][b + 1, case["drafts"][b, i]] += 1
                place = int(case["positions"][4 * b]) + i
                committed["recent_ids"][b + 1, place % RECENT_IDS] = case["drafts"][b, i]
        assert_same_bits(draw(committed), [t[k::4] for t in together])


@pytest.mark.parametrize("value", [0.0, 3.0, torch.inf, -torch.inf, torch.nan])
def test_greedy_rows_on_a_cpu_are_those_of_the_specification(value: float) -> None:
    """Rows with ties, with nothing to draw and with a value not finite, alone and beside a row that is not
    greedy."""
    logits = torch.randn(6, 50)
    logits[:, 7] = logits[:, 3] = 4.0
    logits[2, 5], logits[4] = value, -torch.inf
    for temperature in (torch.zeros(2), torch.tensor([0.0, 0.8])):
        case = make_case(logits, 2, temperature=temperature, seed=torch.arange(2))
        case["num_valid_ids"] = 44
        assert_same_bits(draw(case), sample.reference(*arguments(case)))


@pytest.mark.parametrize("feature", [PENALTIES, BIAS, STOP_IDS, BAD_WORDS])
def test_each_processor_forbids_a_greedy_request_its_peak_on_a_cpu(feature: int) -> None:
    """The short path for greedy rows is for requests without any."""
    logits = torch.zeros(2, 50)
    logits[:, 7], logits[:, 9] = 3.0, 2.0
    tables: dict[str, Any] = {
        PENALTIES: {"presence_penalty": 1.5, "output_counts": torch.ones(3, 50, dtype=torch.int32)},
        BIAS: {"bias": torch.zeros(3, 50)},
        STOP_IDS: {"stop_ids": torch.full((3, 1), 7), "min_position": 20},
        BAD_WORDS: {"bad_words": [[[7]]] * 3},
    }[feature]
    if feature == PENALTIES:
        tables["output_counts"][:, 9] = 0
    if feature == BIAS:
        tables["bias"][:, 7] = -100.0
    assert draw(make_case(logits, 2)).token.tolist() == [7, 7]
    assert draw(make_case(logits, 2, **tables)).token.tolist() == [9, 9]


def test_a_low_temperature_draws_evenly_and_does_not_overflow() -> None:
    logits = torch.full((4000, 4), 20.0)
    logits[:, 3] = 19.0
    case = make_case(logits, 4000, temperature=1e-5, seed=torch.arange(4000))
    counts = torch.bincount(draw(case).token, minlength=4).tolist()
    assert counts[3] == 0
    assert all(abs(count - 4000 / 3) < 150 for count in counts[:3])
    logits = torch.tensor([[3e38, -3e38, 3.1e38, 3.1e38]]).expand(200, 4).contiguous()
    case = make_case(logits, 200, temperature=1e-5, seed=torch.arange(200))
    assert set(draw(case).token.tolist()) == {2, 3}


def test_registration_and_compile() -> None:
    cases = [part_of(full_case(37, 2), 0, requests) for requests in (3, 12)]
    for overload in (torch.ops.compiled_mtp.sample.default, torch.ops.compiled_mtp.filter_logits.default):
        check_registration(overload, tuple(cases[0].values()))
    check_compiles(
        lambda *flat: draw(dict(zip(cases[0], flat, strict=True))),
        [tuple(case.values()) for case in cases],
    )


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("logits", torch.zeros(6, 8, dtype=torch.bfloat16), "logits must have dtype"),
        ("logits", torch.zeros(8), "logits must have shape"),
        ("logits", torch.zeros(8, 6).t(), "logits must have a last dimension of stride 1"),
        ("state_index", torch.zeros(4, dtype=torch.int32), "state_index must have shape"),
        ("state_index", torch.zeros(2, dtype=torch.int64), "state_index must have dtype"),
        ("drafts", torch.zeros(2, dtype=torch.int64), "drafts must have shape"),
        ("drafts", torch.zeros(2, 1, dtype=torch.int64), "drafts must have at least 2 columns, got 1"),
        ("logits", torch.zeros(6, 7), "logits must have 8 columns, got 7; name the columns' ids"),
        ("column_ids", torch.zeros(7, dtype=torch.int64), "column_ids must have shape"),
        ("masks", torch.zeros(5, 1, dtype=torch.int32), "masks must have shape"),
        ("masks", torch.zeros(6, 0, dtype=torch.int32), "masks must have 1 words a row, got 0"),
        ("bad_words", torch.zeros(3, 1, 8, dtype=torch.int64), "bad_words must have shape"),
        ("positions", torch.zeros(6, dtype=torch.int32), "positions must have dtype"),
        ("top_p", torch.ones(5), "top_p must have shape"),
        ("top_p", torch.ones(6)[::2], "top_p must have a last dimension of stride 1"),
        ("top_k", torch.ones(3, dtype=torch.int64), "top_k must have dtype"),
        ("output_counts", torch.zeros(2, 8, dtype=torch.int32), "output_counts must have shape"),
        ("bias", torch.zeros(3, 7), "bias must have shape"),
        ("prompt_seen", torch.zeros(3, 8), "prompt_seen must have dtype"),
        ("num_valid_ids", 9, "num_valid_ids must be in 1..8, got 9"),
    ],
)
def test_bad_arguments_raise(name: str, value: Any, message: str) -> None:
    case = make_case(torch.zeros(6, 8), 2)
    with pytest.raises(ValueError, match=message):
        draw(case | {name: value})


def test_rows_are_those_of_whole_requests() -> None:
    case = make_case(torch.zeros(6, 8), 2)
    with pytest.raises(ValueError, match="logits must have a multiple of 2 rows, got 5"):
        draw(case | {"logits": torch.zeros(5, 8), "positions": torch.zeros(5, dtype=torch.int64)})


def test_eight_tokens_have_their_probabilities_with_every_processor() -> None:
    """20,000 draws per setting, neighbours in one call, each in two rows of a window: chi-square p > 0.001"""
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.3, "repetition_penalty": 0.8, "top_p": 0.8},
    ]
    repeats, vocab = 20000, 8
    requests = len(settings) * repeats
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(settings) * 2, vocab, generator=generator)
    slots = requests + 1
    counts = torch.randint(0, 2, (1, vocab), generator=generator, dtype=torch.int32)
    case = make_case(
        logits.repeat(repeats, 1),
        requests,
        tokens=torch.tensor([0, 3]).repeat(requests),
        positions=torch.tensor([20, 21]).repeat(requests),
        seed=torch.arange(requests),
        bias=torch.randn(1, vocab, generator=generator).expand(slots, vocab).contiguous(),
        stop_ids=torch.full((slots, 1), 6),
        min_position=21,
        bad_words=[[[3, 1]]] * slots,
        output_counts=counts.expand(slots, vocab).contiguous(),
        **{
            name: [
                wish.get(name, {"top_p": 1.0, "repetition_penalty": 1.0}.get(name, 0)) for wish in settings
            ]
            * repeats
            for name in sorted({name for wish in settings for name in wish})
        },
    )
    by_row = draw(case).token.view(repeats, len(settings) * 2)
    for row in range(len(settings) * 2):
        scores, _ = numpy_scores(case, row)
        weight = torch.from_numpy(np.exp(scores - scores.max()))
        expected = weight / weight.sum() * repeats
        found = torch.bincount(by_row[:, row], minlength=vocab).double()
        kept = expected > 0
        assert int(found[~kept].sum()) == 0
        statistic = ((found[kept] - expected[kept]) ** 2 / expected[kept]).sum()
        freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
        assert float(torch.special.gammaincc(freedom, statistic / 2)) > 0.001
