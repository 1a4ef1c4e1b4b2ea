"""Experts in scaled codes on a GPU: rows have the same bits in every tile, tokens at every depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from compiled_mtp.ops.moe_experts import moe_experts_blocks
from tests.checkpoints import write_checkpoint
from tests.gguf.test_tensors import SHAPES
from tests.gguf_files import write_gguf
from tests.gpu.test_four_bits import check_tiles
from tests.gpu.test_moe import float64_block
from tests.gpu.test_scaled_codes import streams
from tests.models.test_scaled_codes import SIZES, medium
from tests.ops.harness import poisoned_allocations, rel_l2
from tests.ops.test_moe_blocks import KIND_PAIRS, case_of, first_rows, values_of
from tests.ops.test_moe_w4a16 import arguments

pytestmark = pytest.mark.gpu
EXPERTS: dict[str, Any] = SIZES | {"num_layers": 4, "moe_intermediate_size": 512, "num_experts": 8}


@pytest.mark.parametrize("kinds", KIND_PAIRS, ids=[" and ".join(pair) for pair in KIND_PAIRS])
@pytest.mark.parametrize(("experts", "top_k", "width", "inner"), [(24, 4, 2048, 512), (6, 2, 256, 128)])
def test_experts_have_the_same_bits_and_the_values_of_float64(
    experts: int, top_k: int, width: int, inner: int, kinds: tuple[str, str]
) -> None:
    case = case_of(300, experts, top_k, width, inner, kinds)
    stacks = [values_of(case, name).float().cuda() for name in ("gate_up", "down")]
    case = {name: one.cuda() if isinstance(one, torch.Tensor) else one for name, one in case.items()}
    exact = float64_block(case["x"], case["weights"], case["ids"], *stacks, None, None)
    whole = moe_experts_blocks(**case)
    assert rel_l2(whole, exact) < 4e-3
    for rows in (1, 3, 4, 16, 17, 33, 64, 65, 129):
        with poisoned_allocations():
            got = moe_experts_blocks(**first_rows(case, rows))
        assert torch.equal(got, whole[:rows]), rows
    check_tiles(arguments(moe_experts_blocks, first_rows(case, 129)), whole[:129])


def shared_in_q8_0(name: str) -> Type:
    """The types of Q4_K_M, with the shared expert in Q8_0 and experts' down in Q6_K."""
    types = {"_shexp": Type.Q8_0, "ffn_down_exps": Type.Q6_K}
    return next((kind for part, kind in types.items() if part in name), medium(name))


@pytest.mark.parametrize("name", ["moe", "next"])
def test_tokens_do_not_depend_on_depth_batch_or_cache(tmp_path: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "source", **(EXPERTS | SHAPES[name]))
    model = write_gguf(source, tmp_path / "model.gguf", shared_in_q8_0)
    three = streams(model, 3, mtp_step=0)
    assert streams(model, 1, mtp_step=0)["0"] == three["0"]
    for depth in (1, 3):
        assert streams(model, 3, three, mtp_step=depth) == three, depth
    many = streams(model, 20, mtp_step=3)
    assert {name: many[name] for name in three} == three
    assert streams(model, 3, mtp_step=3, prefix_cache=False) == three
    assert streams(model, 3, mtp_step="auto") == three
