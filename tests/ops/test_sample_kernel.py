"""The sampling kernels, in Triton's interpreter, against the specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compiled_mtp.ops.features import BAD_WORDS, BIAS, PENALTIES, STOP_IDS
from compiled_mtp.ops.sample import filter_logits, sample
from tests.ops.harness import assert_same_bits, poisoned_allocations
from tests.ops.sample_cases import (
    Case,
    arguments,
    full_case,
    in_columns,
    make_case,
    numpy_scores,
    part_of,
)


def assert_kernel_equals_reference(case: Case) -> None:
    with poisoned_allocations():
        got = sample.launch(*arguments(case))
    assert_same_bits(got, sample.reference(*arguments(case)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kept", [31, 15, 0])
def test_kernel_in_interpreter(interpreter: None, kept: int) -> None:
    case = full_case(2100, 1) if kept else full_case(150, 1)
    case["features"] &= kept
    if kept < 16:
        case["masks"] = None
    assert_kernel_equals_reference(case)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("feature", [PENALTIES, BIAS, STOP_IDS, BAD_WORDS])
def test_kernel_processors_in_interpreter(interpreter: None, feature: int) -> None:
    case = part_of(full_case(80, 3), 4, 5)
    case["features"] &= feature
    case["masks"] = None
    assert_kernel_equals_reference(case)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernel_by_column_ids_in_interpreter(interpreter: None) -> None:
    case = in_columns(full_case(300, 2), torch.randperm(300)[:130])
    assert_kernel_equals_reference(case)
    assert_kernel_equals_reference(case | {"drafts": torch.randint(0, 300, (12, 4))})


def test_kernel_at_a_low_temperature_in_interpreter(interpreter: None) -> None:
    logits = torch.full((8, 4200), 20.0)
    logits[4:, 2100] = 3e38
    case = make_case(logits, 8, temperature=1e-5, seed=torch.arange(8), top_p=[1.0, 0.5] * 4)
    assert_kernel_equals_reference(case)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_filtered_logits_equal_numpy_and_the_kernel_gives_them(interpreter: None) -> None:
    case = full_case(150, 2)
    got = filter_logits(*arguments(case))
    for row in range(24):
        scores, is_random = numpy_scores(case, row)
        scores = scores - scores.max() if is_random else scores
        np.testing.assert_allclose(got[row].double().numpy(), scores, rtol=2e-6, atol=2e-6)
    with poisoned_allocations():
        assert_same_bits([filter_logits.launch(*arguments(case))], [got])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernel_searches_flat_rows_in_interpreter(interpreter: None) -> None:
    # More candidates than one chunk holds, with few and with many equal values.
    logits = torch.randn(3, 5000)
    logits[1] = logits[1].round()
    case = make_case(logits, 3, temperature=1.0, top_p=[0.95, 0.9, 0.6], top_k=[0, 0, 4000], seed=[1, 2, 3])
    with poisoned_allocations():
        token, _ = sample.launch(*arguments(case))
    assert torch.equal(token, sample.reference(*arguments(case))[0])


def test_kernel_searches_rows_with_a_distant_peak_in_interpreter(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold lies in the lowest quarter of the first interval, which has more values than a chunk."""
    from compiled_mtp.ops.sample import kernel

    rows, vocab = 4, 12288
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(vocab, generator=generator) * 0.5 - 4).expand(rows, vocab).contiguous()
    logits[:, 77] = 3.0
    filters = {"top_p": [0.5, 0.9, 1.0, 1.0], "top_k": [0, 0, 300, 9000]}
    case = make_case(logits, rows, temperature=1.0, seed=list(range(rows)), **filters)
    interval = (rows, kernel.CHUNK_GROUPS * kernel.GROUP)
    empty, guards = torch.empty, []

    def guarded_empty(shape: Any, **options: Any) -> torch.Tensor:
        if tuple(shape) != interval:
            return empty(shape, **options)
        size = interval[0] * interval[1]
        whole = empty((size + rows * vocab,), **options).fill_(float("nan"))
        guards.append(whole[size:])
        return whole[:size].view(interval)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    token, _ = sample.launch(*arguments(case))
    assert guards
    assert guards[0].isnan().all()
    assert torch.equal(token, sample.reference(*arguments(case))[0])
