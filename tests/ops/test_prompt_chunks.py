"""Chunks of several prompts in one call: every operator gives each the bits that it has alone."""

from __future__ import annotations

import random

import pytest
import torch

from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS, PROMPT_CHUNK_MULTIPLE
from compiled_mtp.ops.spec_conv1d import conv_prefill
from tests.ops.gdn_cases import Shape, torch_threads
from tests.ops.prompt_chunk_cases import CUTS, Cut, check_attention, check_conv, check_gdn, lay_out_cuts

SHAPE = Shape(1, 3, 32, 16)
SMALL = Shape(1, 2, 16, 16)
HEADS = (4, 2, 16)


def random_cuts(seed: int) -> list[Cut]:
    rng = random.Random(seed)
    slots = rng.sample(range(1, 8), rng.randint(1, 7))
    return [
        (slot, 64 * rng.choice([0, 0, 1, 3]), rng.choice([1, 2, 7, 8, 63, 64, 65, 100])) for slot in slots
    ]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_on_the_cpu(seed: int | None, dtype: torch.dtype, num_threads: int) -> None:
    cuts = CUTS if seed is None else random_cuts(seed)
    with torch_threads(num_threads):
        check_gdn(gdn_prefill, SHAPE, dtype, "cpu", cuts)
        check_conv(conv_prefill, SHAPE, dtype, "cpu", cuts)
        check_attention(paged_attention, HEADS, dtype, "cpu", cuts, first_key=seed or 0)


def test_the_specifications() -> None:
    check_gdn(gdn_prefill.reference, SMALL, torch.float32, "cpu")
    check_attention(paged_attention.reference, HEADS, torch.float32, "cpu", first_key=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_in_interpreter(interpreter: None, dtype: torch.dtype) -> None:
    """Few rows: in the interpreter even these are many programs."""
    check_gdn(gdn_prefill.launch, SMALL, dtype, "cpu", [(3, 64, 65), (1, 0, 1)])
    check_conv(conv_prefill.launch, SMALL, dtype, "cpu", [(3, 0, 9), (1, 64, 2), (2, 0, 1)])
    check_attention(paged_attention.launch, (2, 1, 16), dtype, "cpu", [(3, 0, 17), (1, 64, 3)], first_key=1)


def test_a_convolution_program_has_rows_of_one_chunk(interpreter: None) -> None:
    from compiled_mtp.ops.spec_conv1d.kernel import PREFILL_ROWS

    assert PROMPT_CHUNK_MULTIPLE % PREFILL_ROWS == 0


def test_more_chunks_than_kernels_support_are_refused() -> None:
    cuts = [(1, 0, 1)] * (MAX_PROMPT_CHUNKS + 1)
    with pytest.raises(
        ValueError, match=f"prompt chunks must be 1 to {MAX_PROMPT_CHUNKS}, got {MAX_PROMPT_CHUNKS + 1}; use"
    ):
        check_conv(conv_prefill, SMALL, torch.float32, "cpu", cuts)
    _, _, length, first_row = lay_out_cuts(CUTS, "cpu").arguments
    table, rows = torch.zeros((6, 2), dtype=torch.int32), torch.zeros((400, 4, 16))
    kv, positions = torch.zeros((3, 2, 2, 64, 16)), torch.zeros(400, dtype=torch.int64)
    with pytest.raises(ValueError, match="first_row and length must come together"):
        paged_attention(rows, rows, kv, None, table, positions, 1.0, 0, first_row)
    assert paged_attention(rows, rows, kv, None, table, positions, 1.0, 0, first_row, length).shape == (
        400,
        64,
    )
