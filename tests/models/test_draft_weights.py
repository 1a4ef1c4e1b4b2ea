"""What drafts read: the plan of it, its memory, its values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.draft_weights import DraftPlan, HeadDtype, plan_drafts
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weight_format import FP8, NO_FORMATS, W8A8, Formats, four_bits
from compiled_mtp.ops import int4
from compiled_mtp.ops.fp8 import dequantize, quantize_weight
from tests.checkpoints import write_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("shape", [(300, 200), (128, 256), (8500, 130)])
def test_quantised_rows_come_back_within_half_a_step(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]
    weight[:128, :128] = 0.0
    values, scale = quantize_weight(weight)
    error = (dequantize(values, scale) - weight).abs()
    # Half a step of 3 mantissa bits, and of the smallest subnormal, 2 ** -9, of a block.
    blocks = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert (error <= weight.abs() / 16 * 1.001 + blocks * 2**-10).all()
    for first in (0, 128):
        assert torch.equal(values[first : first + 128], quantize_weight(weight[first : first + 128])[0])


@pytest.mark.parametrize("is_multiplied_out", [False, True])
@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        (None, "weights"),
        ((1, 5, 7), "weights"),
        ((1, 5, 7), "float8_e4m3fn"),
        (None, "float8_e4m3fn"),
        (tuple(range(1, 96, 3)), "int4"),
        (None, "int4"),
    ],
)
def test_a_plan_knows_the_memory_of_what_it_makes(
    ids: tuple[int, ...] | None, dtype: HeadDtype, is_multiplied_out: bool
) -> None:
    width = 256 if dtype == "int4" else 144
    head = torch.randn(208, width)
    plan = DraftPlan(ids, dtype, is_multiplied_out=is_multiplied_out)
    made = plan.make_head(lambda rows: head if rows is None else head[rows], head.device)
    held = sum(t.nbytes for t in (made.weight, made.scale) if t is not None)
    assert plan.head_bytes(208, width, head.itemsize) == held
    rows = head if ids is None else head[list(ids)]
    if dtype != "weights":
        assert made.weight is not None
        assert (made.scale is None) == is_multiplied_out
        read = int4.dequantize if dtype == "int4" else dequantize
        values = made.weight if made.scale is None else read(made.weight, made.scale)
        # Half a step of three mantissa bits, or of a fifteenth of a group's range.
        rtol, atol = (0.0, 0.3) if dtype == "int4" else (0.07, 0.01)
        torch.testing.assert_close(values, rows, rtol=rtol, atol=atol)
        assert not torch.equal(values, rows)
    else:
        assert made.weight is None if ids is None else torch.equal(made.weight, rows)
    assert made.ids is None if ids is None else made.ids.tolist() == list(ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory: Path = write_checkpoint(tmp_path_factory.mktemp("dense"))
    # The sizes of 4B's head.
    return replace(read_model_config(directory), vocab_size=248320, hidden_size=2560)


def on_gpu(monkeypatch: pytest.MonkeyPatch, gib: float, capability: tuple[int, int] = (9, 0)) -> None:
    facts = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: 1.0)


def planned(
    model: ModelConfig, asked: str = "auto", formats: Formats = NO_FORMATS, **given: Any
) -> DraftPlan:
    options = {"dtype": torch.bfloat16, "device": GPU, "world": 1, "ids": None} | given
    ids = options.pop("ids")
    return plan_drafts(asked, model, ids, formats, **options)


def test_auto_is_decided_by_device_dtype_and_total_memory(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = DraftPlan(None, "float8_e4m3fn", True, quantizes_rows=True)
    layer, with_int4 = replace(both, head="weights"), replace(both, head="int4")
    on_gpu(monkeypatch, 79.2)
    assert planned(model) == both
    assert planned(model, dtype=torch.float32) == planned(model, device=CPU) == DraftPlan()
    assert planned(model, "weights") == DraftPlan()
    # The copy takes 606 MiB: a 32nd of 18.9 GiB.
    on_gpu(monkeypatch, 19)
    assert planned(model) == both
    on_gpu(monkeypatch, 18)
    assert planned(model) == with_int4
    assert planned(model, "float8_e4m3fn") == both
    assert planned(model, world=2) == replace(both, world=2)
    # In bfloat16 the rows would take twice as much.
    assert planned(model, ids=(1, 2, 3)) == replace(both, ids=(1, 2, 3))
    # A copy in int4 takes 313 MiB: a 32nd of 9.8 GiB.
    on_gpu(monkeypatch, 9.7)
    assert planned(model) == layer
    # Such GPUs have no products of quantised rows.
    on_gpu(monkeypatch, 79.2, (8, 9))
    assert planned(model) == replace(both, quantizes_rows=False)
    on_gpu(monkeypatch, 79.2, (8, 0))
    assert planned(model) == DraftPlan(None, "int4")
    assert planned(model, ids=(1, 2)) == DraftPlan((0, 1, 2, *range(3, 16)), "int4")
    with pytest.raises(
        ValueError, match=r"^draft_dtype must be auto, int4 or weights on this GPU, got float8_e4m3fn; "
    ):
        planned(model, "float8_e4m3fn")
    on_gpu(monkeypatch, 79.2, (7, 5))
    assert planned(model) == DraftPlan()
    with pytest.raises(ValueError, match=r"^draft_dtype must be auto or weights on this GPU, got int4; "):
        planned(model, "int4")
    assert planned(model, "float8_e4m3fn", device=CPU) == replace(both, is_multiplied_out=True)


def test_a_head_in_int4(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 79.2)
    with_int4 = DraftPlan(None, "int4", True, quantizes_rows=True)
    packed = {"layers.0.ffn.down.weight": four_bits(128, torch.bfloat16)}
    assert planned(model, formats=packed) == planned(model, "int4") == with_int4
    # Ids fill whole blocks of codes, with the lowest that are missing.
    made = planned(model, "int4", ids=(2, *range(40, 56)))
    assert made.ids == (*range(16), *range(40, 56))
    narrow = replace(model, hidden_size=2624)
    assert planned(narrow, formats=packed) == replace(with_int4, head="float8_e4m3fn")
    rule = r"^draft_dtype must be float8_e4m3fn, auto or weights for 248320 rows of 2624, got int4; "
    with pytest.raises(ValueError, match=rule):
        planned(narrow, "int4")
    assert planned(model, "int4", world=8) == replace(with_int4, world=8)
    # Each of eight ranks has 1,940.5 blocks of 16 rows.
    uneven = replace(model, vocab_size=248320 + 64)
    assert planned(uneven, formats=packed, world=8).head == "float8_e4m3fn"
    with pytest.raises(ValueError, match=r"^draft_dtype must be auto or weights on this GPU, got int4; "):
        planned(model, "int4", dtype=torch.float32)
    assert planned(model, "int4", device=CPU) == replace(with_int4, is_multiplied_out=True)


def test_what_is_stored_in_few_bits_stays(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 79.2)
    head = "embed.weight" if model.tie_word_embeddings else "lm_head.weight"
    form = four_bits(128, torch.bfloat16)
    stored = {head: FP8, "mtp.layer.mixer.qkv.weight": form}
    plan = planned(model, formats=stored)
    assert plan == DraftPlan(None, "weights", True, quantizes_rows=True)
    formats = plan.formats(model, stored)
    assert formats["mtp.layer.mixer.qkv.weight"] is form
    others = {"fc", "layer.mixer.o_proj", "layer.ffn.gate_up", "layer.ffn.down"}
    assert formats.keys() == {*stored, *(f"mtp.{name}.weight" for name in others)}


def test_rows_are_quantised_where_they_are_whole_groups(model: ModelConfig) -> None:
    sizes = {"hidden_size": 256, "num_q_heads": 4, "head_dim": 64, "intermediate_size": 384}
    model = replace(model, **sizes)
    plan = DraftPlan(None, "float8_e4m3fn", True, quantizes_rows=True)

    def quantised(plan: DraftPlan, model: ModelConfig) -> set[str]:
        formats = plan.formats(model, NO_FORMATS)
        assert all(form in (FP8, W8A8) for form in formats.values())
        return {
            name.removeprefix("mtp.").removesuffix(".weight") for name in formats if formats[name] is W8A8
        }

    every = {"fc", "layer.mixer.qkv", "layer.mixer.o_proj", "layer.ffn.gate_up", "layer.ffn.down"}
    assert quantised(plan, model) == every
    # Each of two ranks has 192 columns of down.
    assert quantised(replace(plan, world=2), model) == every - {"layer.ffn.down"}
    assert quantised(replace(plan, quantizes_rows=False), model) == set()
    mixture = replace(model, num_experts=8, moe_intermediate_size=64)
    assert quantised(plan, mixture) == every - {"layer.ffn.gate_up", "layer.ffn.down"}
    mixture = replace(mixture, moe_intermediate_size=128)
    assert quantised(plan, mixture) == every
    head = torch.randn(300, 256)
    assert plan.make_head(lambda rows: head, CPU).quantizes_rows
    assert not plan.make_head(lambda rows: head[:, :200], CPU).quantizes_rows
