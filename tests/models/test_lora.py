"""LoRA adapters: the weights that they make, and what is refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.cli import run
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.lora import read_adapter, read_merged
from compiled_mtp.models.lora_weights import MergedWeight
from compiled_mtp.models.weights import check_weights, load_weights
from compiled_mtp.request import SamplingParams
from tests.adapters import ALPHA, RANK, merge_by_formula, write_adapter
from tests.checkpoints import allocate, read_stored, write_checkpoint
from tests.engines import prompt_of

MIXERS = r"self_attn\.[qkvo]_proj|linear_attn\.(in_proj_\w+|out_proj)"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
FFN = ("gate_proj", "up_proj", "down_proj")
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_batch": 1, "prefill_chunk": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "next": {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4},
    "dense": {"family": "qwen3_5", "tied": True},
    "dense-flat": {"family": "qwen3_5", "flat": True, "sharded": True},
    "moe": {"family": "qwen3_5_moe"},
}


def pairs_of(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


def loaded(path: Path, lora: Path | None = None) -> dict[str, torch.Tensor]:
    config = read_model_config(path)
    check_weights(config, path, {}, torch.float32, with_mtp=True, free_bytes=2**40, lora=lora)
    parameters = allocate(config)
    load_weights(config, path, parameters, with_mtp=True, lora=lora)
    return parameters


def save_merged(base: Path, to: Path, merged: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint with other weights, in float32."""
    to.mkdir()
    (to / "config.json").write_text((base / "config.json").read_text())
    save_file({name: w.float().contiguous() for name, w in merged.items()}, to / "model.safetensors")
    return to


@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_parameters_are_those_of_the_merged_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    base = write_checkpoint(tmp_path / "base", **options)
    adapter = write_adapter(tmp_path / "lora", base)
    merged = merge_by_formula(base, pairs_of(adapter), lambda module: ALPHA / RANK)
    wanted = loaded(save_merged(base, tmp_path / "merged", merged))
    plain, got = loaded(base), loaded(base, adapter)
    assert got.keys() == wanted.keys()
    changed = [name for name in got if not torch.equal(got[name], plain[name])]
    assert any("in_proj" in name for name in changed)
    assert any("qkv" in name for name in changed)
    assert any("ffn" in name for name in changed)
    for name in got:
        assert torch.equal(got[name], wanted[name]), name
    assert not any(name.startswith("mtp.") for name in changed)


@pytest.mark.parametrize("is_stabilised", [False, True])
def test_ranks_and_alphas_follow_their_patterns(tmp_path: Path, is_stabilised: bool) -> None:
    base = write_checkpoint(tmp_path / "base")
    patterns = {"alpha_pattern": {"self_attn.q_proj": 2, r"layers\.\d+\.mlp\.up_proj": 32}}
    ranks = {"self_attn.q_proj": 8, "down_proj": 2}
    given = {"ranks": ranks, "config": patterns | {"use_rslora": is_stabilised}}
    adapter = write_adapter(tmp_path / "lora", base, dtype=torch.bfloat16, **given)

    def scale_of(module: str) -> float:
        rank = next((r for end, r in ranks.items() if module.endswith(end)), RANK)
        alpha = 2 if module.endswith("q_proj") else 32 if module.endswith("up_proj") else ALPHA
        return alpha / (rank**0.5 if is_stabilised else rank)

    merged = merge_by_formula(base, pairs_of(adapter), scale_of)
    config = read_model_config(base)
    weights = read_merged(config, base, adapter)
    found = [weight for weight in weights.values() if isinstance(weight, MergedWeight)]
    assert len(found) == len(pairs_of(adapter)) // 2 > 10
    for weight in found:
        whole = tuple(slice(0, size) for size in weight.shape)
        assert torch.equal(weight.read(whole), merged[weight.name].float()), weight.name


def test_a_part_of_a_weight_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    """So ranks, which read parts, hold the weights of one process."""
    base = write_checkpoint(tmp_path / "base", intermediate_size=576)
    adapter = write_adapter(tmp_path / "lora", base)
    weights = read_merged(read_model_config(base), base, adapter)
    weight = weights["layers.0.mlp.up_proj.weight"]
    whole = weight.read((slice(0, 576), slice(0, 128)))
    for rows, columns in (
        ((0, 1), (0, 128)),
        ((250, 530), (64, 128)),
        ((511, 576), (3, 7)),
        ((256, 512), (0, 9)),
    ):
        part = (slice(*rows), slice(*columns))
        assert torch.equal(weight.read(part), whole[part])


EXPERTS: dict[str, dict[str, Any]] = {
    "a tensor for each": {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4},
    "stacked": {"family": "qwen3_5_moe"},
}


def expert_pairs(base: Path, count: int = 8, inner: int = 64, hidden: int = 128) -> dict[str, torch.Tensor]:
    """Return the matrices of the experts of layers 0 and 3, as PEFT names them."""
    generator = torch.Generator().manual_seed(4)
    prefix = "base_model.model.model"
    pairs = {}
    for layer in (0, 3):
        for name, width, height in (("experts.base_layer", hidden, 2 * inner), ("experts", inner, hidden)):
            module = f"{prefix}.layers.{layer}.mlp.{name}"
            pairs[f"{module}.lora_A.weight"] = torch.randn(RANK * count, width, generator=generator)
            pairs[f"{module}.lora_B.weight"] = torch.randn(height, RANK * count, generator=generator)
    return pairs


@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
def test_experts_are_those_of_the_merged_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    base = write_checkpoint(tmp_path / "base", **options)
    pairs = expert_pairs(base)
    # Of the two stacks, one has an alpha of its own.
    given = {"alpha_pattern": {"experts.down_proj": 2}, "target_parameters": ["gate_up_proj", "down_proj"]}
    nothing = re.compile("nothing")
    adapter = write_adapter(tmp_path / "lora", base, targets=nothing, tensors=pairs, config=given)
    plain, got = loaded(base), loaded(base, adapter)
    for name, stack, alpha in (("experts.base_layer", "gate_up", ALPHA), ("experts", "down", 2)):
        for layer in (0, 3):
            a, b = (pairs[f"base_model.model.model.layers.{layer}.mlp.{name}.lora_{m}.weight"] for m in "AB")
            a, b = a.double().view(8, RANK, -1), b.double().view(len(b), RANK, 8)
            added = torch.einsum("ore,eri->eoi", b, a) * alpha / RANK
            parameter = f"layers.{layer}.ffn.{stack}"
            # The last expert of the parameter is the shared one.
            wanted = (plain[parameter][:8].double() + added).float()
            assert torch.allclose(got[parameter][:8], wanted, rtol=1e-6, atol=1e-6), parameter
            assert torch.equal(got[parameter][8], plain[parameter][8])
    assert torch.equal(got["layers.1.ffn.down"], plain["layers.1.ffn.down"])
    described = read_adapter(adapter).describe()
    assert described.endswith(
        "merged into 0 weights and 4 stacks of experts, the MTP head stays the base model's"
    )


@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
def test_a_part_of_an_expert_has_the_bits_of_the_whole(tmp_path: Path, options: dict[str, Any]) -> None:
    base = write_checkpoint(tmp_path / "base", **options)
    nothing = re.compile("nothing")
    adapter = write_adapter(tmp_path / "lora", base, targets=nothing, tensors=expert_pairs(base))
    weights = read_merged(read_model_config(base), base, adapter)
    found = [weight for weight in weights.values() if isinstance(weight, MergedWeight)]
    assert len(found) == (4 if options["family"] == "qwen3_5_moe" else 2 * 3 * 8)
    for weight in found:
        whole = weight.read(tuple(slice(0, size) for size in weight.shape))
        part = tuple(slice(size // 4, size // 2 + 1) for size in weight.shape)
        assert torch.equal(weight.read(part), whole[part])


def head_pair(base: Path, *, copy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The tensors that PEFT saves of an adapter of lm_head: the pair, and the checkpoint's weight."""
    module, head = "base_model.model.lm_head", read_stored(base)["lm_head.weight"]
    generator = torch.Generator().manual_seed(6)
    return {
        f"{module}.lora_A.weight": torch.randn(RANK, head.shape[1], generator=generator),
        f"{module}.lora_B.weight": torch.randn(head.shape[0], RANK, generator=generator),
        f"{module}.base_layer.weight": head if copy is None else copy,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_of_an_untied_head_brings_a_copy_of_it(tmp_path: Path, dtype: torch.dtype) -> None:
    base = write_checkpoint(tmp_path / "base", intermediate_size=64)
    tensors = head_pair(base)
    tensors["base_model.model.lm_head.base_layer.weight"] = read_stored(base)["lm_head.weight"].to(dtype)
    adapter = write_adapter(tmp_path / "lora", base, targets=re.compile("up_proj"), tensors=tensors)
    merged = merge_by_formula(base, pairs_of(adapter), lambda module: ALPHA / RANK)
    plain, got = loaded(base), loaded(base, adapter)
    assert torch.equal(got["lm_head.weight"], merged["lm_head.weight"].float())
    assert not torch.equal(got["lm_head.weight"], plain["lm_head.weight"])


def test_a_copy_of_another_head_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", intermediate_size=64)
    head = read_stored(base)["lm_head.weight"]
    config = read_model_config(base)
    others = (head + (torch.arange(len(head)) == 511)[:, None], head[:-1])
    for number, other in enumerate(others):
        tensors = head_pair(base, copy=other.contiguous())
        adapter = write_adapter(tmp_path / f"lora{number}", base, tensors=tensors)
        message = "lora must be trained on this model, got another lm_head.weight; use the adapter's own base"
        with pytest.raises(ValueError, match=message):
            read_merged(config, base, adapter)
    # A copy without a pair would replace a weight.
    del tensors["base_model.model.lm_head.lora_A.weight"], tensors["base_model.model.lm_head.lora_B.weight"]
    adapter = write_adapter(tmp_path / "alone", base, tensors=tensors)
    with pytest.raises(ValueError, match=r"lora must hold lora_A and lora_B .*lm_head.base_layer.weight"):
        read_merged(config, base, adapter)


def test_matrices_of_other_experts_are_refused(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "qwen3_5_moe")
    dense = write_checkpoint(tmp_path / "dense")
    nothing = re.compile("nothing")
    cases = ((base, {"count": 4}, "must have matrices of rank 4 for 8 experts, got [16, 128] and [128, 16]"),)
    cases += ((base, {"inner": 32}, "lora must have the weights' shapes, got [32, 128] and [64, 32] for m"),)
    cases += ((dense, {}, "lora must have the weights' shapes, got [32, 128] and [128, 32] for m"),)
    for index, (path, sizes, message) in enumerate(cases):
        tensors = expert_pairs(path, **sizes)
        adapter = write_adapter(tmp_path / f"lora{index}", path, targets=nothing, tensors=tensors)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_merged(read_model_config(path), path, adapter)


def test_an_engine_decodes_the_merged_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Speculation and ranks change no token of it, and a replica's identity knows it."""
    base = write_checkpoint(tmp_path / "base", tokenizer=True)
    adapter = write_adapter(tmp_path / "lora", base)
    merged = merge_by_formula(base, pairs_of(adapter), lambda module: ALPHA / RANK)
    other = save_merged(base, tmp_path / "merged", merged)
    (other / "tokenizer.json").write_text((base / "tokenizer.json").read_text())
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

    def decode(**settings: Any) -> list[int]:
        with Engine(EngineConfig(**SMALL | settings)) as engine:
            return engine.generate([prompt_of(12, 3, 300)], params)[0].new_token_ids

    wanted = decode(model=other)
    with caplog.at_level(logging.INFO):
        assert decode(model=base, lora=adapter, mtp_step=3) == wanted
    assert decode(model=base, lora=adapter, mtp_step=0) == wanted
    assert decode(model=base) != wanted
    count = len(pairs_of(adapter)) // 2
    said = f"LoRA adapter {adapter}, merged into {count} weights, the MTP head stays the base model's"
    assert said in caplog.text


def test_weights_under_an_adapter_are_not_replaced(tmp_path: Path) -> None:
    """New weights would lose it without a word."""
    base = write_checkpoint(tmp_path / "base", tokenizer=True)
    adapter = write_adapter(tmp_path / "lora", base, targets=re.compile("q_proj"))
    with Engine(EngineConfig(model=base, lora=adapter, **SMALL)) as engine:
        with pytest.raises(ValueError, match="lora must be left out of an engine whose weights change, got"):
            engine.update_weights(base)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert engine.generate([prompt_of(5, 3, 300)], params)[0].finish_reason == "length"


def test_the_command_line_says_what_an_adapter_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_checkpoint(tmp_path / "base", tokenizer=True)
    adapter = write_adapter(tmp_path / "lora", base, targets=re.compile("q_proj"))
    flags = ["--device=cpu", "--max-model-len=64", "--max-tokens=2", f"--lora={adapter}"]
    assert run.main([f"--model={base}", "--prompt=def", *flags]) == 0
    line = f"LoRA adapter: {adapter}, merged into 1 weights, the MTP head stays the base model's"
    assert line in capsys.readouterr().err.splitlines()


def test_an_adapter_of_the_head_says_so(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    module = "base_model.model.mtp.layers.0.self_attn.o_proj"
    pair = {f"{module}.lora_A.weight": torch.ones(4, 512), f"{module}.lora_B.weight": torch.ones(128, 4)}
    adapter = write_adapter(tmp_path / "lora", base, targets=re.compile("q_proj"), tensors=pair)
    assert read_adapter(adapter).describe().endswith("merged into 2 weights, 1 of them in the MTP head")
    plain, got = loaded(base)["mtp.layer.mixer.o_proj.weight"], loaded(base, adapter)
    assert torch.equal(got["mtp.layer.mixer.o_proj.weight"], plain + 4 * ALPHA / RANK)


PAIR = "base_model.model.model.language_model.layers.0.mlp.up_proj"
MERGE = "; merge it (PEFT: merge_and_unload, then save_pretrained) and pass that as the model"
REFUSED_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, f"peft_type must be LORA, got IA3{MERGE}"),
    ({"use_dora": True}, f"use_dora of adapter_config.json must be off, got True{MERGE}"),
    (
        {"modules_to_save": ["lm_head"]},
        "modules_to_save of adapter_config.json must be off, got ['lm_head']; m",
    ),
    ({"bias": "all"}, "bias of adapter_config.json must be off, got 'all'; merge it"),
    ({"some_new_key": 3}, "some_new_key of adapter_config.json must be off, got 3; merge it"),
    (
        {"init_lora_weights": "pissa"},
        f"init_lora_weights must leave the base model as it is, got pissa{MERGE}",
    ),
    ({"r": 0}, "r must be a positive number, got 0; fix adapter_config.json"),
    ({"r": 8}, "must have matrices of rank 8, got [4, 128] and [64, 4]; fix adapter_config.json"),
    ({"lora_alpha": "16"}, "lora_alpha must be a positive number, got '16'; fix adapter_config.json"),
    ({"rank_pattern": {"(": 4}}, "rank_pattern must hold regular expressions, got ("),
    ({"rank_pattern": [4]}, "rank_pattern must be an object, got [4]; fix adapter_config.json"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false, got 'yes'; fix adapter_config.json"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_KEYS, ids=[next(iter(k)) for k, _ in REFUSED_KEYS])
def test_keys_that_ask_for_more_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    base = write_checkpoint(tmp_path / "base", intermediate_size=64)
    adapter = write_adapter(tmp_path / "lora", base, targets=re.compile("up_proj"), config=changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_adapter(adapter)


REFUSED_TENSORS: list[tuple[dict[str, torch.Tensor], str]] = [
    (
        {f"{PAIR}.lora_magnitude_vector": torch.ones(3)},
        "lora must hold lora_A and lora_B of linears and experts only, got",
    ),
    (
        {"base_model.model.lm_head.weight": torch.ones(3)},
        "lora must hold lora_A and lora_B of linears and experts only",
    ),
    ({f"{PAIR}2.lora_A.weight": torch.ones(4, 8)}, "up_proj2 must have lora_A and lora_B, got lora_A alone"),
    ({f"{PAIR}.lora_A.weight": torch.ones(4, 8, 1)}, "lora_A.weight must be a matrix, got [4, 8, 1]; merge"),
    ({f"{PAIR}.lora_A.weight": torch.ones(4, 8).int()}, "lora_A.weight must be BF16 or F16 or F32, got I32"),
    (
        {f"{PAIR}.lora_A.weight": torch.full((4, 128), float("nan"))},
        "lora must be finite, got NaN or infinity",
    ),
    (
        {f"{PAIR}.lora_A.weight": torch.ones(4, 64)},
        "lora must have the weights' shapes, got [64, 64] for model",
    ),
    (
        {f"{PAIR}9.lora_A.weight": torch.ones(4, 8), f"{PAIR}9.lora_B.weight": torch.ones(8, 4)},
        f"lora must change weights of the checkpoint, got {PAIR}9.lora_B.weight; use the adapter's own base",
    ),
    (
        {
            "base_model.model.lm_head.lora_A.weight": torch.ones(4, 128),
            "base_model.model.lm_head.lora_B.weight": torch.ones(512, 4),
        },
        "lora must not change lm_head, which is the embedding, got base_model.model.lm_head.lora_B.weight",
    ),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED_TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    base = write_checkpoint(tmp_path / "base", intermediate_size=64, tied=True)
    adapter = write_adapter(tmp_path / "lora", base, targets=re.compile("up_proj"), tensors=tensors)
    config = read_model_config(base)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_weights(config, base, {}, torch.float32, with_mtp=True, free_bytes=2**40, lora=adapter)
    assert "\n" not in str(error.value)


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
    base = write_checkpoint(tmp_path / "base", fp8_scale=torch.bfloat16, **options)
    plain = write_checkpoint(tmp_path / "plain", **options)
    config = read_model_config(base)
    adapter = write_adapter(tmp_path / "lora", plain, targets=re.compile("up_proj"))
    message = r"lora must change unquantised weights of safetensors, got model.*up_proj.weight in F8_E4M3; "
    with pytest.raises(ValueError, match=message):
        read_merged(config, base, adapter)
    # Gates are plain in FP8 releases too.
    gates = write_adapter(tmp_path / "gates", plain, targets=re.compile(r"in_proj_a"))
    assert sum(isinstance(w, MergedWeight) for w in read_merged(config, base, gates).values()) == 3


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", intermediate_size=64)
    with pytest.raises(ValueError, match=r"lora must be a directory with adapter_config.json, got .*nowhere"):
        read_adapter(tmp_path / "nowhere")
    adapter = write_adapter(tmp_path / "lora", base, targets=re.compile("nothing"))
    with pytest.raises(ValueError, match="lora must change a weight, got none in"):
        read_adapter(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"lora must hold adapter_model.safetensors, got .*safe_serialization"
    ):
        read_adapter(adapter)


@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_peft_merges_to_the_same_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    """An adapter that PEFT wrote, with its own merge as the oracle."""
    reason = "peft is no requirement of the tests: pip install peft accelerate"
    peft = pytest.importorskip("peft", reason=reason)
    from transformers import AutoModelForCausalLM

    base = write_checkpoint(tmp_path / "base", tokenizer=True, **options)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(5)
    is_next, is_moe = options["family"] == "qwen3_next", options["family"] == "qwen3_5_moe"
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=3,
        # Of Qwen3-Next's FFNs PEFT tunes the stacks of experts instead of each linear.
        target_modules=[*TARGETS, *FFN]
        if is_next
        else rf".*({MIXERS}|mlp\.(shared_expert\.)?({'|'.join(FFN)}))",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if is_moe else None,
        rank_pattern={"q_proj": 6},
        alpha_pattern={"k_proj": 5},
        use_rslora=True,
        init_lora_weights=False,
    )
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "lora")
    merged = {name: w.detach() for name, w in tuned.merge_and_unload().state_dict().items()}
    weights = read_merged(read_model_config(base), base, tmp_path / "lora")
    found = {name: weight for name, weight in weights.items() if isinstance(weight, MergedWeight)}
    assert len(found) > 10
    assert any(".experts." in name for name in found) == (is_next or is_moe)
    for name, weight in found.items():
        values = weight.read(tuple(slice(0, size) for size in weight.shape))
        # PEFT multiplies in float32.
        assert torch.allclose(values, part_of(merged, name), rtol=1e-5, atol=1e-5), name


def part_of(merged: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a tensor of transformers' model, which stacks experts, by its name in a checkpoint."""
    if f"model.{name}" in merged:
        return merged[f"model.{name}"]
    module, expert, part, _ = name.rsplit(".", 3)
    stack = "down_proj" if part == "down_proj" else "gate_up_proj"
    whole = merged[f"model.{module}.{stack}"][int(expert)]
    return whole if part == "down_proj" else whole.chunk(2)[part == "up_proj"]
