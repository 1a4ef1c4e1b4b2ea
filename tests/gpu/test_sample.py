"""sample on the device: the reference's tokens, its distribution, row invariance and graph replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compiled_mtp.ops.sample import Sampled, sample
from tests.ops.harness import assert_same_bits, poisoned_allocations
from tests.ops.sample_cases import Case, arguments, full_case, make_case, numpy_scores, part_of

pytestmark = pytest.mark.gpu
VOCAB = 248320


def draw(case: Case) -> Sampled:
    return sample(*arguments(case))


def on_device(case: Case) -> Case:
    return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in case.items()}


def mixed_case(requests: int, query_len: int, scale: float = 3.0) -> Case:
    """Requests of every kind in turn over the full vocabulary, with the head of a language model's logits."""
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
        token, logprob, is_finite = draw(on_device(case))
    wanted, wanted_logprob, wanted_is_finite = draw(case)
    assert torch.equal(is_finite.cpu(), wanted_is_finite)
    # Equal noise bits and equal processed logits; the logarithms may differ in the last bit, which decides
    # only between two ids whose scores are as good as equal.
    different = (token.cpu() != wanted).nonzero().flatten().tolist()
    assert len(different) * 500 <= len(wanted), f"rows {different} differ"
    same = token.cpu() == wanted
    torch.testing.assert_close(logprob.cpu()[same], wanted_logprob[same], rtol=0, atol=4e-6)


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
def test_rows_do_not_depend_on_their_company(with_tables: bool) -> None:
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
