"""Four-bit weights that stay codes: their values are the stored ones, in every format and on every rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compiled_mtp.benchmarks.released_shapes import fill_random
from compiled_mtp.cli.inspect import describe_run
from compiled_mtp.config import EngineConfig
from compiled_mtp.models import weight_format
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.shards import with_prompt_rows
from compiled_mtp.models.weight_format import Formats, describe_recipe
from compiled_mtp.models.weights import check_weights, load_weights, read_formats
from compiled_mtp.ops.int4 import dequantize
from compiled_mtp.request import SamplingParams
from tests.checkpoints import allocate, count_weights, write_checkpoint
from tests.communicators.threads import ThreadCommunicator, thread_communicators
from tests.engines import make_engine
from tests.models.test_quantised import FORMATS, SMALL, every_linear
from tests.quantised import quantise

CPU = torch.device("cpu")
LAYERS = ("layers.0", "layers.1", "mtp.layer")
# Models whose products are as wide as a unit.
SIZES: dict[str, Any] = SMALL | {"hidden_size": 256, "intermediate_size": 512}
EXPERTS: dict[str, Any] = {
    "family": "qwen3_5_moe",
    "trunk_experts": "per_expert",
    "mtp_experts": "per_expert",
}
EXPERTS |= SMALL | {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
INTEGERS = (
    "gptq",
    "gptq-g32-bf16",
    "gptq-row",
    "gptq-asym",
    "gptq-v2-asym",
    "gptq-act-order-of-static-groups",
    "auto-round-awq",
    "awq",
    "awq-g32",
    "pack",
    "pack-g64",
    "pack-channel-asym",
    "pack-asym",
)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep codes on every device, as on a GPU."""
    monkeypatch.setattr(weight_format, "reads_codes", lambda device: True)


def values_of(codes: dict[str, torch.Tensor], parameter: str) -> torch.Tensor:
    """The values in bfloat16 of a weight of codes, or of a stack of such weights."""
    words, groups = codes[parameter], codes[f"{parameter}_scale"]
    if words.dim() == 2:
        return dequantize(words, groups).bfloat16()
    return torch.stack([dequantize(*one).bfloat16() for one in zip(words, groups, strict=True)])


def loaded(directory: Path, formats: Formats, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    config = read_model_config(directory)
    dtype = torch.bfloat16
    check_weights(config, directory, formats, dtype, with_mtp=True, free_bytes=2**40, rank=rank, world=world)
    parameters = allocate(config.shard(rank, world), True, dtype, formats)
    load_weights(config, directory, parameters, with_mtp=True, formats=formats, rank=rank, world=world)
    return parameters


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", INTEGERS)
def test_values_are_the_dequantised_ones(tmp_path: Path, name: str, world: int) -> None:
    packer, config = FORMATS[name]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)
    formats = read_formats(read_model_config(tmp_path), tmp_path, CPU, None)
    kept = {parameter for parameter, form in formats.items() if form.group}
    assert {parameter.split(".")[-2] for parameter in kept} == {
        *("qkv", "o_proj", "in_proj", "out_proj", "gate_up", "down", "lm_head")
    }
    assert any(parameter.startswith("mtp.") for parameter in kept)
    # Without codes, in_proj is also q|k|v|z alone, in the activations' dtype.
    plain = {p: replace(weight_format.PLAIN, name="as it is", block=1) for p in kept if "in_proj" in p}
    for rank in range(world):
        codes, values = loaded(tmp_path, formats, rank, world), loaded(tmp_path, plain, rank, world)
        for parameter in kept:
            assert torch.equal(values_of(codes, parameter), values[parameter]), parameter
        for parameter in values.keys() - kept:
            assert torch.equal(codes[parameter], values[parameter]), parameter


def test_columns_in_another_order_than_their_groups_are_multiplied_out(tmp_path: Path) -> None:
    packer, config = FORMATS["gptq-act-order"]
    directory = write_checkpoint(tmp_path / "model", **SIZES)
    twin = quantise(directory, every_linear(packer), config)
    formats = read_formats(read_model_config(directory), directory, CPU, None)
    assert not any(form.group for form in formats.values())
    found, wanted = loaded(directory, formats), loaded(twin, formats)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_packed_head_gives_the_logits_and_rows_of_its_values(tmp_path: Path) -> None:
    packer, config = FORMATS["gptq"]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, lambda module: packer if module == "lm_head" else None, config)
    model = read_model_config(tmp_path)
    formats = read_formats(model, tmp_path, CPU, None)
    assert [*formats] == ["lm_head.weight"]
    codes = loaded(tmp_path, formats)
    values, dtype = values_of(codes, "lm_head.weight"), torch.bfloat16
    hidden, ids = torch.randn(5, model.hidden_size).to(dtype), torch.tensor([3, 255, 16, 3, 31])
    words, groups = codes["lm_head.weight"], codes["lm_head.weight_scale"]
    wanted = F.linear(hidden.float(), dequantize(words, groups))

    def run(communicator: ThreadCommunicator | None) -> list[torch.Tensor]:
        rank, world = (0, 1) if communicator is None else (communicator.rank, communicator.world)
        target = TargetModel(model.shard(rank, world), dtype, CPU, formats, communicator)
        own = {name: part.data for name, part in target.named_parameters()}
        load_weights(model, tmp_path, own, with_mtp=False, formats=formats, rank=rank, world=world)
        assert target.is_head_packed
        assert target.head_bytes * world == words.nbytes + groups.nbytes
        return [target.logits(hidden), target.head_rows(ids), target.head_rows(None)]

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(run, thread_communicators(2)))
    for logits, some, own in (run(None), *ranks):
        torch.testing.assert_close(logits, wanted)
        assert torch.equal(some, values[ids])
        assert len(own) in (len(values), len(values) // 2)
    assert torch.equal(torch.cat([own for _, _, own in ranks]), values)


@pytest.mark.parametrize("name", ["gptq-8", "fp8-channel", "nvfp4"])
def test_other_formats_are_dequantised(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)
    assert not any(
        form.group for form in read_formats(read_model_config(tmp_path), tmp_path, CPU, None).values()
    )


def test_float32_activations_and_scales_have_values(tmp_path: Path) -> None:
    packer, config = FORMATS["gptq"]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)
    assert not read_formats(read_model_config(tmp_path), tmp_path, CPU, None, torch.float32)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("name", ["gptq", "awq-g32", "pack-g64", "auto-round-awq", "pack-channel-asym"])
def test_experts_hold_the_dequantised_values(tmp_path: Path, name: str, family: str) -> None:
    """The stacks of the trunk and of the MTP layer, shared expert included."""
    packer, config = FORMATS[name]
    sizes = EXPERTS | {"family": family, "num_key_heads": 2, "num_value_heads": 4}
    write_checkpoint(tmp_path, **sizes)
    quantise(tmp_path, every_linear(packer), config)
    model = read_model_config(tmp_path)
    formats = read_formats(model, tmp_path, CPU, None)
    stacks = {f"{layer}.ffn.{end}" for layer in LAYERS for end in ("gate_up", "down")}
    assert stacks <= {parameter for parameter, form in formats.items() if form.group}
    assert not any("shared" in parameter for parameter in formats)
    assert describe_recipe(None, formats).endswith("and 6 stacks of experts in four bits)")
    run = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16")
    described = list(describe_run(run, model, tmp_path, read_stored(tmp_path)))
    assert any(line.endswith(" matrices and 6 stacks of experts in four bits") for line in described)
    codes = loaded(tmp_path, formats)
    values = loaded(tmp_path, {n: form for n, form in formats.items() if n not in stacks})
    for stack in stacks:
        assert codes[stack].dtype == torch.int16
        assert torch.equal(values_of(codes, stack), values[stack]), stack
    bare = {name: form for name, form in formats.items() if name not in stacks}
    needed = [count_weights(model, read_stored(tmp_path), given, torch.bfloat16) for given in (formats, bare)]
    numbers = sum(values[stack].numel() for stack in stacks)
    scales = sum(codes[f"{stack}_scale"].nbytes for stack in stacks)
    assert needed[1] - needed[0] == numbers * 2 - numbers // 2 - scales


@pytest.mark.parametrize("other", [None, "gptq-asym", "fp8-channel"])
def test_a_shared_expert_may_be_stored_otherwise(tmp_path: Path, other: str | None) -> None:
    """Plain, as in Qwen's GPTQ releases, in other groups, or in a format that is multiplied out."""
    packer, _ = FORMATS["gptq"]
    others = None if other is None else FORMATS[other][0]
    write_checkpoint(tmp_path, **EXPERTS)
    choose = every_linear(packer)
    quantise(tmp_path, lambda module: others if "shared_expert." in module else choose(module))
    formats = read_formats(read_model_config(tmp_path), tmp_path, CPU, None)
    codes = loaded(tmp_path, formats)
    values = loaded(tmp_path, {n: form for n, form in formats.items() if ".ffn." not in n})
    for layer in LAYERS:
        for end in ("gate_up", "down"):
            stack, shared = f"{layer}.ffn.{end}", f"{layer}.ffn.shared_{end}"
            assert len(codes[stack]) == EXPERTS["num_experts"]
            assert codes[shared].dtype == torch.bfloat16
            found = torch.cat((values_of(codes, stack), codes[shared][None]))
            assert torch.equal(found, values[stack]), stack


@pytest.mark.parametrize("is_shared_plain", [False, True])
def test_ranks_hold_codes_of_their_experts(tmp_path: Path, is_shared_plain: bool) -> None:
    """Two ranks: some rows of gate|up, and some rows of down."""
    packer, _ = FORMATS["gptq"]
    sizes = EXPERTS | {"moe_intermediate_size": 256, "num_key_heads": 2}
    write_checkpoint(tmp_path, **sizes)
    choose = every_linear(packer)
    quantise(tmp_path, lambda module: None if is_shared_plain and "shared" in module else choose(module))
    config = read_model_config(tmp_path)
    formats = with_prompt_rows(read_formats(config, tmp_path, CPU, None))
    plain = {name: form for name, form in formats.items() if ".ffn." not in name}
    for rank in range(2):
        held = []
        for given in (formats, plain):
            communicator: Any = SimpleNamespace(rank=rank, world=2, keeps_prompt_rows=True)
            shape = (config.shard(rank, 2), torch.bfloat16, CPU)
            parameters = dict(TargetModel(*shape, given, communicator).named_parameters())
            how: dict[str, Any] = {"rank": rank, "world": 2, "prompt_rows": True, "formats": given}
            load_weights(config, tmp_path, parameters, with_mtp=False, **how)
            held.append(parameters)
        codes, values = held
        for end in ("gate_up", "down"):
            stack = f"layers.1.ffn.{end}"
            found = values_of(codes, stack)
            if is_shared_plain:
                shared = stack.replace("gate", "shared_gate").replace("down", "shared_down")
                found = torch.cat((found, codes[shared][None]))
            assert torch.equal(found, values[stack]), stack


@pytest.mark.parametrize("is_shared_plain", [False, True])
def test_a_mixture_of_codes_computes_that_of_their_values(tmp_path: Path, is_shared_plain: bool) -> None:
    packer, _ = FORMATS["awq-g32"]
    write_checkpoint(tmp_path, **EXPERTS)
    choose = every_linear(packer)
    quantise(tmp_path, lambda module: None if is_shared_plain and "shared" in module else choose(module))
    config = read_model_config(tmp_path)
    formats = read_formats(config, tmp_path, CPU, None)
    plain = {name: form for name, form in formats.items() if ".ffn." not in name}
    x = torch.randn(5, 256).bfloat16()
    sums = []
    for given in (formats, plain):
        model = TargetModel(config, torch.bfloat16, CPU, given)
        load_weights(config, tmp_path, dict(model.named_parameters()), with_mtp=False, formats=given)
        mixture: Any = model.layers[0].ffn
        assert mixture.has_codes is (given is formats)
        sums.append(mixture(x, object()).double())
    assert (sums[0] - sums[1]).norm() / sums[1].norm() < 1e-2


def test_made_up_experts_are_codes(tmp_path: Path) -> None:
    """Weights that no checkpoint fills, as a benchmark has them."""
    config = replace(read_model_config(write_checkpoint(tmp_path, **EXPERTS)), four_bit_group=64)
    formats = read_formats(config, None, CPU, None)
    parameters = allocate(config, True, torch.bfloat16, formats)
    fill_random(parameters)
    for layer in LAYERS:
        values = values_of(parameters, f"{layer}.ffn.gate_up").float()
        assert values.shape == (5, 256, 256)
        assert 0.6 < values.std() * 16 < 1.0


def test_a_mixture_keeps_both_stacks_or_neither(tmp_path: Path) -> None:
    """One plain matrix of one expert of a layer."""
    packer, config = FORMATS["gptq"]
    write_checkpoint(tmp_path, **EXPERTS)
    choose = every_linear(packer)
    plain = "layers.0.mlp.experts.1.down_proj"
    quantise(tmp_path, lambda module: None if module.endswith(plain) else choose(module), config)
    formats = read_formats(read_model_config(tmp_path), tmp_path, CPU, None)
    kept = {parameter.partition(".ffn.")[0] for parameter in formats if ".ffn." in parameter}
    # The MTP layer has the number 0 too.
    assert kept == {"layers.1"}
    loaded(tmp_path, formats)


def test_tokens_do_not_depend_on_depth_with_a_packed_head(tmp_path: Path) -> None:
    packer, config = FORMATS["gptq"]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)

    def tokens(**options: Any) -> list[list[int]]:
        engine = make_engine(tmp_path, dtype="bfloat16", max_batch=2, max_model_len=128, **options)
        assert engine.runner.step.target.is_head_packed
        params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
        return [output.new_token_ids for output in engine.generate([[1, 2, 3, 4], [*range(20)]], params)]

    plainly = tokens(mtp_step=0)
    assert tokens(mtp_step=2) == plainly
    assert tokens(mtp_step=2, draft_vocab=64) == plainly
    assert tokens(mtp_step=2, draft_dtype="float8_e4m3fn") == plainly
