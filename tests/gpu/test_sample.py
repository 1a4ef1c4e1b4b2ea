"""sample on the device: the reference's tokens, its distribution, row invariance and graph replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compiled_mtp.ops.row_logprobs import row_logprobs
from compiled_mtp.ops.sample import Sampled, filter_logits, sample
from tests.ops.harness import assert_same_bits, poisoned_allocations
from tests.ops.sample_cases import Case, arguments, full_case, make_case, numpy_scores, part_of

pytestmark = pytest.mark.gpu
VOCAB = 248320


def draw(case: Case) -> Sampled:
    return sample(*arguments(case))


def on_device(case: Case) -> Case:
    return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in case.items()}


def mixed_case(requests: int, query_len: int, scale: float = 3.0) -> Case:
    """Return requests of every kind in turn over the full vocabulary, with logits like a language model's."""
    kinds = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 20, 0.8, 0.0),
        (1.0, 0, 0.95, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.6, 50, 0.95, 0.02),
        (1.3, 100000, 0.999, 0.0),
        (1.0, 1, 1.0, 0.0),
    ]
    rows = requests * query_len
    logits = torch.randn(rows, VOCAB) * scale
    head = torch.randint(0, VOCAB, (rows, 200))
    logits.scatter_(
        1, head, (20 - 2 * torch.arange(1, 201).float().log()).expand(rows, 200) + torch.randn(rows, 200)
    )
    columns = list(zip(*(kinds[i % len(kinds)] for i in range(requests)), strict=True))
    return make_case(
        logits,
        requests,
        tokens=torch.randint(0, VOCAB, (rows,)),
        positions=torch.arange(rows) + (1 << 32) - 3,
        seed=torch.randint(-(2**62), 2**62, (requests,)),
        temperature=columns[0],
        top_k=columns[1],
        top_p=columns[2],
        min_p=columns[3],
        num_valid_ids=248077,
    )


def assert_reference_tokens(case: Case) -> None:
    with poisoned_allocations():
        token, outcome = draw(on_device(case))
    wanted, wanted_outcome = draw(case)
    assert torch.equal(outcome.cpu(), wanted_outcome)
    # Noise and processed logits have equal bits; the logarithms may differ in the last bit, which decides
    # only between two ids of nearly equal scores.
    different = (token.cpu() != wanted).nonzero().flatten().tolist()
    assert len(different) * 500 <= len(wanted), f"rows {different} differ"


@pytest.mark.parametrize("query_len", [1, 4])
def test_full_vocabulary_gives_the_reference_tokens(query_len: int) -> None:
    assert_reference_tokens(mixed_case(16, query_len))


def test_flat_logits_give_the_reference_tokens() -> None:
    assert_reference_tokens(mixed_case(8, 1, scale=0.5) | {"logits": torch.randn(8, VOCAB)})


def test_a_peak_above_flat_logits_gives_the_reference_tokens() -> None:
    """The threshold lies in another quarter than the peak, among tens of thousands of values."""
    logits = torch.randn(8, VOCAB) * torch.tensor([[0.5], [1.0], [1.5], [2.0]]).repeat(2, 1)
    logits[:, 77] = 12.0
    case = make_case(
        logits - 3,
        8,
        temperature=[1.0, 1.0, 1.0, 1.5] * 2,
        top_p=[0.5, 0.9, 0.99, 0.999, 1.0, 1.0, 0.95, 1.0],
        top_k=[0, 0, 0, 0, 300, 20000, 100000, 200000],
        seed=torch.randint(-(2**62), 2**62, (8,)),
    )
    assert_reference_tokens(case)


@pytest.mark.parametrize("vocab", [37, 64, 2100, 5000])
def test_every_processor_gives_the_reference_tokens(vocab: int) -> None:
    assert_reference_tokens(full_case(vocab, 3))


@pytest.mark.parametrize("with_tables", [True, False])
def test_rows_do_not_depend_on_other_rows(with_tables: bool) -> None:
    case = on_device(full_case(5000, 3) if with_tables else mixed_case(64, 4))
    requests = len(case["state_index"])
    together = draw(case)
    for size in (1, 2, 3, 4) if with_tables else (1, 2, 8, 32):
        parts = [draw(part_of(case, first, size)) for first in range(0, requests, size)]
        assert_same_bits([torch.cat(column) for column in zip(*parts, strict=True)], together)


def test_tokens_have_the_specified_distribution() -> None:
    logits = torch.randn(1, 50)
    repeats = 20000
    parameters: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.02},
    ]
    for over in parameters:
        case = make_case(logits.expand(repeats, 50).contiguous(), repeats, seed=torch.arange(repeats), **over)
        counts = torch.bincount(draw(on_device(case))[0].cpu(), minlength=50).double()
        scores, _ = numpy_scores(case, 0)
        weight = np.exp(scores - scores.max())
        expected = torch.from_numpy(weight / weight.sum()) * repeats
        assert int(counts[expected == 0].sum()) == 0
        kept = expected > 0
        freedom = int(kept.sum()) - 1
        chi_square = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_graph_replays_with_new_logits_and_parameters() -> None:
    static = on_device(full_case(5000, 3))
    draw(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draw(static)
    for seed in range(3):
        torch.manual_seed(seed)
        static["logits"].copy_(torch.randn(36, 5000) * 3)
        static["positions"].add_(3)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            static[name].copy_(static[name].roll(1))
        graph.replay()
        assert_same_bits([t.clone() for t in out], draw(static))


@pytest.mark.parametrize("columns", [300, 5000])
def test_a_cut_head_and_its_chain_give_the_reference_tokens(columns: int) -> None:
    case = full_case(5000, 1)
    ids = torch.randperm(5000)[:columns]
    drafts = torch.randint(0, 5000, (12, 3))
    assert_reference_tokens(case | {"logits": case["logits"][:, ids], "column_ids": ids, "drafts": drafts})


def test_filtered_logits_are_those_of_the_reference() -> None:
    case = full_case(5000, 3)
    got, wanted = filter_logits(*arguments(on_device(case))).cpu(), filter_logits(*arguments(case))
    torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [150, VOCAB])
def test_log_probabilities_are_those_of_the_reference(vocab: int) -> None:
    logits, chosen = torch.randn(8, vocab) * 3, torch.randint(0, vocab - 3, (8,))
    logits[0] = logits[0].round()
    with poisoned_allocations():
        got = row_logprobs(logits.cuda(), chosen.cuda(), vocab - 3)
    wanted = row_logprobs(logits, chosen, vocab - 3)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=4e-6)
