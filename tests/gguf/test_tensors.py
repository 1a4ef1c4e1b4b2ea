"""A GGUF file gives its checkpoint, tensor by tensor: names, shapes, order and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from compiled_mtp.gguf.config import hf_config
from compiled_mtp.gguf.container import read_container
from compiled_mtp.gguf.tensors import StoredTensor, stored_tensors
from tests import gguf_files
from tests.checkpoints import write_checkpoint
from tests.gguf_files import convert, multiplied_out, read_tensors, write_gguf

SHAPES: dict[str, dict[str, Any]] = {
    "next": {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4},
    "dense-r1-tied": {"family": "qwen3_5", "num_key_heads": 2, "num_value_heads": 2, "tied": True},
    "dense-r3": {"family": "qwen3_5", "num_key_heads": 2, "num_value_heads": 6, "fp32_gates": False},
    "moe": {"family": "qwen3_5_moe", "num_key_heads": 2, "num_value_heads": 4},
    "no-head": {"family": "qwen3_5", "num_key_heads": 1, "num_value_heads": 2, "mtp": False},
}
# Rows of whole blocks of 256 values, in a small model.
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_layers": 2,
    "interval": 2,
    "vocab_size": 64,
    "num_q_heads": 1,
}


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a file, the experts of a layer stacked."""
    stored = stored_tensors(read_container(path))
    return stacked({name: one.rows(0, one.shape[0]) for name, one in stored.items()})


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {n: w for n, w in tensors.items() if ".experts." not in n or w.dim() == 3}
    for name in [n for n in tensors if n.endswith(".experts.0.gate_proj.weight")]:
        base = name.removesuffix(".0.gate_proj.weight")
        count = sum(n.startswith(base) and n.endswith(".down_proj.weight") for n in tensors)
        each = [
            [tensors[f"{base}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")] for e in range(count)
        ]
        out[f"{base}.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in each])
        out[f"{base}.down_proj"] = torch.stack([parts[2] for parts in each])
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_a_bfloat16_file_gives_the_bits_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64, **SHAPES[name])
    got = read_all(write_gguf(source, tmp_path / "model.gguf"))
    want = stacked(read_tensors(source))
    assert got.keys() == want.keys()
    for tensor, w in want.items():
        if w.dtype == torch.float32 and tensor.endswith("A_log"):
            # exp and log in float32 lose the last bit.
            torch.testing.assert_close(got[tensor], w, rtol=0, atol=3e-7)
        else:
            # float32 keeps 1 + w to within 2^-24.
            is_norm = "norm" in tensor and "linear_attn" not in tensor
            kept = (w.abs() > 2**-15) if is_norm else torch.ones_like(w, dtype=torch.bool)
            assert torch.equal(got[tensor][kept], w.float()[kept]), tensor
            torch.testing.assert_close(got[tensor], w.float(), rtol=0, atol=2**-24)


def test_fused_experts_and_a_legacy_input_projection(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, num_experts=4, **SHAPES["moe"])
    apart = read_all(write_gguf(source, tmp_path / "apart.gguf"))
    fused = read_all(write_gguf(source, tmp_path / "fused.gguf", fused_experts=True))
    assert apart.keys() == fused.keys()
    assert all(torch.equal(apart[name], fused[name]) for name in apart)


def mixture(name: str) -> Type:
    """Return the type of a tensor as in Q4_K_M, with some other types."""
    kinds = {
        "token_embd": Type.Q6_K,
        "attn_v.": Type.Q6_K,
        "ffn_down": Type.Q6_K,
        "attn_qkv": Type.Q8_0,
        "ssm_alpha": Type.F32,
        "ssm_b": Type.F16,
        "attn_gate": Type.MXFP4,
        "attn_k.": Type.Q5_0,
        "attn_q.": Type.Q4_0,
    }
    return next((kind for part, kind in kinds.items() if part in name), Type.Q4_K)


@pytest.mark.parametrize("name", ["next", "dense-r3", "moe"])
def test_a_mixture_of_types_gives_the_values_of_the_package(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **BLOCKS, **SHAPES[name])
    path = write_gguf(source, tmp_path / "model.gguf", mixture)
    kinds = {one.dtype for one in stored_tensors(read_container(path)).values()}
    assert {"Q4_K", "Q6_K", "Q8_0", "F32", "F16", "Q5_0", "Q4_0"} <= {
        k for kind in kinds for k in kind.split()
    }
    got = read_all(path)
    want = stacked(read_tensors(multiplied_out(source, tmp_path / "plain", mixture)))
    assert got.keys() == want.keys()
    for tensor, w in want.items():
        if tensor.endswith("A_log"):
            torch.testing.assert_close(got[tensor], w, rtol=0, atol=3e-7)
        else:
            assert torch.equal(got[tensor], w), tensor
    assert sum(torch.equal(w, read_tensors(source).get(n, w).float()) for n, w in want.items()) < len(want)


@pytest.mark.parametrize("name", ["next", "dense-r3", "moe"])
def test_any_rows_and_columns_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **BLOCKS, **SHAPES[name])
    stored = stored_tensors(read_container(write_gguf(source, tmp_path / "model.gguf", mixture)))
    rng = np.random.default_rng(0)
    for one in stored.values():
        whole = one.rows(0, one.shape[0])
        assert tuple(whole.shape) == one.shape
        assert one.num_bytes > 0
        for _ in range(3):
            start, stop = sorted(int(i) for i in rng.integers(0, one.shape[0] + 1, 2))
            assert torch.equal(one.rows(start, stop), whole[start:stop])
            region = (slice(start, stop), *(slice(0, size) for size in one.shape[1:]))
            if len(one.shape) == 2:
                region = (region[0], slice(one.shape[1] // 2, one.shape[1]))
            assert torch.equal(one.read(region), whole[region])


def test_bytes_are_those_of_the_blocks(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", **BLOCKS)
    container = read_container(write_gguf(source, tmp_path / "model.gguf", mixture))
    whole = sum(tensor.num_bytes for tensor in container.tensors.values())
    assert sum(one.num_bytes for one in stored_tensors(container).values()) == whole


def test_tensors_that_no_checkpoint_has_keep_their_names(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64)
    tensors = convert(source)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen35")
    for key, value in read_container(write_gguf(source, tmp_path / "plain.gguf")).metadata.items():
        if key.startswith("qwen35."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    odd = {"blk.0.ffn_gate_inp_s.weight": (4, 4), "blk.9.attn_q.weight": (4, 4), "rope_freqs.weight": (8,)}
    odd |= {"blk.4.nextn.shared_head_head.weight": (4, 4), "blk.0.attn_qkv.bias": (4,)}
    for name, shape in odd.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    for name, one in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(one.values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = stored_tensors(read_container(tmp_path / "model.gguf"))
    assert stored.keys() - read_tensors(source).keys() == odd.keys()


def nvfp4_file(path: Path, scale: dict[str, np.ndarray]) -> Path:
    """Write a file with a dense and a stacked weight in NVFP4, with tensors `scale` that multiply them."""
    writer = gguf.GGUFWriter(path, "qwen35moe")
    numbers = {"block_count": 1, "context_length": 8, "embedding_length": 64, "expert_count": 3}
    numbers |= {"expert_used_count": 1, "expert_feed_forward_length": 2}
    numbers |= {"expert_shared_feed_forward_length": 2, "rope.dimension_count": 16}
    numbers |= {f"attention.{n}": 1 for n in ("head_count", "head_count_kv")}
    numbers |= {f"attention.{n}": 64 for n in ("key_length", "value_length")}
    numbers |= {f"ssm.{n}": 1 for n in ("group_count", "time_step_rank")}
    numbers |= {f"ssm.{n}": 64 for n in ("state_size", "inner_size")} | {"ssm.conv_kernel": 4}
    for key, value in numbers.items():
        writer.add_uint32(f"qwen35moe.{key}", value)
    writer.add_float32("qwen35moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35moe.rope.freq_base", 1e7)
    writer.add_tensor("token_embd.weight", np.ones((4, 64), np.float32))
    rng = np.random.default_rng(0)
    for name, shape in (("blk.0.attn_k", (4, 36)), ("blk.0.ffn_gate_up_exps", (3, 4, 36))):
        raw = rng.integers(0, 128, shape, dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=Type.NVFP4)
    for name, values in scale.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_factors_of_nvfp4_multiply_weights_and_experts(tmp_path: Path) -> None:
    factors = {
        "blk.0.attn_k.scale": np.array([0.3], np.float32),
        "blk.0.attn_k.input_scale": np.array([7], np.float32),
        "blk.0.ffn_gate_up_exps.scale": np.array([0.1, 0.2, 0.7], np.float32),
    }
    path = nvfp4_file(tmp_path / "m.gguf", factors)
    container = read_container(path)
    stored = stored_tensors(container)
    assert not any("scale" in name for name in stored)
    raw = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    want = dequantize(raw["blk.0.attn_k.weight"], Type.NVFP4).reshape(4, 64) * np.float32(0.3)
    assert np.array_equal(stored["layers.0.self_attn.k_proj.weight"].rows(0, 4).numpy(), want)
    stack = dequantize(raw["blk.0.ffn_gate_up_exps.weight"], Type.NVFP4).reshape(3, 4, 64)
    for expert, factor in enumerate(factors["blk.0.ffn_gate_up_exps.scale"]):
        for place, part in enumerate(("gate", "up")):
            got = stored[f"layers.0.mlp.experts.{expert}.{part}_proj.weight"].rows(0, 2).numpy()
            assert np.array_equal(got, stack[expert, 2 * place : 2 * place + 2] * factor)


def test_factors_of_another_number_are_refused(tmp_path: Path) -> None:
    factors = {"blk.0.ffn_gate_up_exps.scale": np.ones(2, np.float32)}
    path = nvfp4_file(tmp_path / "m.gguf", factors)
    with pytest.raises(
        ValueError, match=r"ffn_gate_up_exps\.scale must be 1 or 3 factors in F32, got F32 of sh"
    ):
        stored_tensors(read_container(path))


def test_a_file_that_shrinks_and_a_positive_a_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64)
    path = write_gguf(source, tmp_path / "model.gguf")
    container = read_container(path)
    stored: dict[str, StoredTensor] = stored_tensors(container)
    raw, at = path.read_bytes(), container.tensors["blk.0.ssm_a"].offset
    path.write_bytes(raw[:at] + b"\x00\x00\x80\x3f" + raw[at + 4 :])
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_a must be negative, got \[1\.0\]; convert"):
        stored["layers.0.linear_attn.A_log"].rows(0, 2)
    path.write_bytes(raw[:-100])
    last = max(stored.values(), key=lambda one: one.source.runs[-1].tensor.offset)
    with pytest.raises(ValueError, match=r"model\.gguf must stay unchanged while it is loaded"):
        last.rows(0, last.shape[0])


def test_a_head_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's converter can write one, for a draft model beside the trunk."""
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64)
    trunk = tuple(f"blk.{layer}." for layer in range(4))
    head = {name: one for name, one in convert(source).items() if not name.startswith(trunk)}
    monkeypatch.setattr(gguf_files, "convert", lambda directory, **_: head)
    path = write_gguf(source, tmp_path / "mtp-model.gguf")
    with pytest.raises(
        ValueError, match=r"mtp-model.gguf must hold the model's layers, got an MTP head alone; "
    ):
        hf_config(read_container(path))


@pytest.mark.parametrize("name", ["dense-r1-tied", "dense-r3", "moe", "no-head"])
def test_ollamas_files_hold_the_same_tensors(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64, **SHAPES[name])
    plain, other = (write_gguf(source, tmp_path / f"{own}.gguf", ollama=own) for own in (False, True))
    want, got = read_all(plain), read_all(other)
    assert got.keys() == want.keys()
    for tensor, w in want.items():
        torch.testing.assert_close(got[tensor], w, rtol=0, atol=2**-24)
    configs = [hf_config(read_container(path)) for path in (plain, other)]
    assert configs[1].pop("eos_token_id") == [5, 6]
    configs[0].pop("eos_token_id")
    assert configs[0] == configs[1]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64)
    both = convert(source)
    both["mtp.layers.0.attn_q.weight"] = both["blk.4.attn_q.weight"]
    monkeypatch.setattr(gguf_files, "convert", lambda directory, **_: both)
    path = write_gguf(source, tmp_path / "model.gguf")
    with pytest.raises(
        ValueError, match=r"hold mtp.layers.0.self_attn.q_proj.weight once, got blk.4.attn_q.weight and mtp"
    ):
        stored_tensors(read_container(path))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"qwen35.attention.head_count_kv": [0, 0, 1, 2]}, "head_count_kv must be one positive integer in"),
        ({"qwen35.attention.head_count_kv": [0, 0, 0, 0]}, "head_count_kv must be one positive integer in"),
        ({"qwen35.ssm.v_head_reordered": False}, "qwen35.ssm.v_head_reordered must be True, got False"),
        ({"qwen35.nextn_predict_layers": None}, "nextn_predict_layers must be 1 in a file with nextn ten"),
        ({"qwen35.norm_top_k_prob": False}, "qwen35.norm_top_k_prob must be True, got False"),
        ({"tokenizer.ggml.eos_token_id": 512}, "eos_token_id must be ids below 512, .*, got 512 in .*con"),
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, r"eos_token_id must be ids below 512, .*, got \[1, 2\] in"),
        ({"tokenizer.ggml.eos_token_id": "end"}, "eos_token_id must be ids below 512, .*, got end in"),
        ({"tokenizer.ggml.eos_token_ids": [1, 700]}, "eos_token_ids must be ids below 512, .*, got 700 in"),
    ],
)
def test_wrong_metadata_are_named(changes: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64)
    path = write_gguf(source, tmp_path / "model.gguf", changes=changes)
    with pytest.raises(ValueError, match=wanted):
        hf_config(read_container(path))


def test_a_config_without_head_has_no_mtp_layer(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64, **SHAPES["no-head"])
    container = read_container(write_gguf(source, tmp_path / "model.gguf"))
    assert hf_config(container)["mtp_num_hidden_layers"] == 0
