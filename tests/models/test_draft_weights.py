"""What drafts read: the plan of it, its memory, its values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.draft_weights import DraftPlan, plan_drafts
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weight_format import FP8, NO_FORMATS, W8A8, Formats, four_bits
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
    ("ids", "is_fp8"), [(None, False), ((1, 5, 7), False), ((1, 5, 7), True), (None, True)]
)
def test_a_plan_knows_the_memory_of_what_it_makes(
    ids: tuple[int, ...] | None, is_fp8: bool, is_multiplied_out: bool
) -> None:
    head = torch.randn(200, 144)
    plan = DraftPlan(ids, is_fp8, is_multiplied_out=is_multiplied_out)
    made = plan.make_head(lambda rows: head if rows is None else head[rows], head.device)
    held = sum(t.nbytes for t in (made.weight, made.scale) if t is not None)
    assert plan.head_bytes(200, 144, head.itemsize) == held
    rows = head if ids is None else head[list(ids)]
    if is_fp8:
        assert made.weight is not None
        assert (made.scale is None) == is_multiplied_out
        values = made.weight if made.scale is None else dequantize(made.weight, made.scale)
        torch.testing.assert_close(values, rows, rtol=0.07, atol=0.01)
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
    both = DraftPlan(None, True, True, quantizes_rows=True)
    layer = replace(both, has_fp8_head=False)
    on_gpu(monkeypatch, 79.2)
    assert planned(model) == both
    assert planned(model, dtype=torch.float32) == planned(model, device=CPU) == DraftPlan()
    assert planned(model, "weights") == DraftPlan()
    # The copy takes 606 MiB: a 32nd of 18.9 GiB.
    on_gpu(monkeypatch, 19)
    assert planned(model) == both
    on_gpu(monkeypatch, 18)
    assert planned(model) == layer
    assert planned(model, "float8_e4m3fn") == both
    assert planned(model, world=2) == replace(both, world=2)
    # Without FP8 the rows would take twice as much.
    assert planned(model, ids=(1, 2, 3)) == replace(both, ids=(1, 2, 3))
    # Such GPUs have no products of quantised rows.
    on_gpu(monkeypatch, 79.2, (8, 9))
    assert planned(model) == replace(both, quantizes_rows=False)
    on_gpu(monkeypatch, 79.2, (8, 0))
    assert planned(model) == DraftPlan()
    assert planned(model, ids=(1, 2)) == DraftPlan((1, 2))
    with pytest.raises(
        ValueError, match=r"^draft_dtype must be auto or weights on this GPU, got float8_e4m3fn; "
    ):
        planned(model, "float8_e4m3fn")
    assert planned(model, "float8_e4m3fn", device=CPU) == replace(both, is_multiplied_out=True)


def test_what_is_stored_in_few_bits_stays(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 79.2)
    head = "embed.weight" if model.tie_word_embeddings else "lm_head.weight"
    form = four_bits(128, torch.bfloat16)
    stored = {head: FP8, "mtp.layer.mixer.qkv.weight": form}
    plan = planned(model, formats=stored)
    assert plan == DraftPlan(None, False, True, quantizes_rows=True)
    formats = plan.formats(model, stored)
    assert formats["mtp.layer.mixer.qkv.weight"] is form
    others = {"fc", "layer.mixer.o_proj", "layer.ffn.gate_up", "layer.ffn.down"}
    assert formats.keys() == {*stored, *(f"mtp.{name}.weight" for name in others)}


def test_rows_are_quantised_where_they_are_whole_groups(model: ModelConfig) -> None:
    sizes = {"hidden_size": 256, "num_q_heads": 4, "head_dim": 64, "intermediate_size": 384}
    model = replace(model, **sizes)
    plan = DraftPlan(None, True, True, quantizes_rows=True)

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
