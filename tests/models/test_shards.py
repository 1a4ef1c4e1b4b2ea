"""Weight shards: two ranks' shards make up the whole model; models that cannot be divided are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.files.reader import FileReader, Run
from compiled_mtp.model_config import ModelConfig, rank_range
from compiled_mtp.models.family import FAMILIES as MODEL_FAMILIES
from compiled_mtp.models.headers import read_headers
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.layout import Layout, with_scales
from compiled_mtp.models.shards import shard_layout
from compiled_mtp.models.weight_format import FP8, Formats
from compiled_mtp.models.weights import load_weights, read_formats
from tests.checkpoints import FAMILIES, FP8_FAMILIES, allocate, write_checkpoint

CPU = torch.device("cpu")
# Two ranks cannot cut models of other sizes at blocks.
_AT_BLOCKS = {"num_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 256}
CASES = [
    *((name, options) for name, options in FAMILIES if options["num_value_heads"] % 2 == 0),
    *((f"{name}-kept", options | _AT_BLOCKS) for name, options in FP8_FAMILIES),
    ("two-kv-heads", {"family": "qwen3_next", "num_kv_heads": 2, "num_key_heads": 2, "num_value_heads": 4}),
]


def layout_of(config: ModelConfig, directory: Path, formats: Formats) -> Layout:
    return MODEL_FAMILIES[config.family].layout(config, read_headers(directory), formats)


def load(
    config: ModelConfig, directory: Path, formats: Formats, rank: int = 0, world: int = 1
) -> dict[str, Any]:
    parameters = allocate(config.shard(rank, world), dtype=torch.bfloat16, formats=formats)
    load_weights(config, directory, parameters, with_mtp=True, formats=formats, rank=rank, world=world)
    return parameters


def assemble(
    whole: Layout, shards: list[tuple[Layout, dict[str, Any]]], like: dict[str, Any]
) -> dict[str, Any]:
    """Put the whole parameters together from shards, by layouts that say where each stored row goes."""
    out = {name: torch.full_like(parameter, float("nan")) for name, parameter in like.items()}
    for layout, parameters in shards:
        for name, stored in layout.items():
            for shard in stored.shards:
                source = next(
                    p
                    for p in whole[name].shards
                    if p.parameter == shard.parameter and p.source <= shard.source < p.source + p.rows
                )
                start = source.start + shard.source - source.source
                target = replace(shard, start=start).view_of(out[shard.parameter], stored.shape)
                if shard.columns is not None:
                    target = target[..., slice(*shard.columns)]
                target.copy_(shard.view_of(parameters[shard.parameter], stored.shape))
    return out


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_two_shards_make_up_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    if name.endswith("-kept"):
        monkeypatch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: True)
    directory = write_checkpoint(tmp_path, **options)
    config = read_model_config(directory)
    formats = read_formats(config, directory, CPU, "w8a16")
    assert bool(formats) == name.endswith("-kept")
    layout = layout_of(config, directory, formats)
    shards = []
    for rank in range(2):
        part = with_scales(shard_layout(layout, config, formats, rank, 2), formats)
        shards.append((part, load(config, directory, formats, rank, 2)))
    whole = load(config, directory, formats)
    joined = assemble(with_scales(layout, formats), shards, whole)
    for key, parameter in whole.items():
        assert torch.equal(joined[key].float(), parameter.float()), key
    held = [sum(p.numel() for p in parameters.values()) for _, parameters in shards]
    assert held[0] == held[1] < sum(p.numel() for p in whole.values())


def test_merged_parameters_are_cut_in_each_part(tmp_path: Path) -> None:
    """Check by hand, on whole parameters: a rank's in_proj is its q, then its k, v, z, b and a."""
    directory = write_checkpoint(tmp_path, "qwen3_next", num_kv_heads=2, num_key_heads=2, num_value_heads=4)
    config = read_model_config(directory)
    whole = load(config, directory, {})
    key, value, gate = 2 * 128, 4 * 128, 4
    cuts: dict[str, tuple[int, list[int]]] = {
        "layers.0.mixer.in_proj.weight": (0, [key, key, value, value, gate, gate]),
        "layers.0.mixer.conv_weight": (0, [key, key, value]),
        "layers.0.mixer.a_log": (0, [gate]),
        "layers.0.mixer.out_proj.weight": (1, [value]),
        "layers.3.mixer.qkv.weight": (0, [2 * 512, 512, 512]),
        "layers.3.mixer.o_proj.weight": (1, [512]),
        "mtp.layer.ffn.gate_up": (1, [64, 64]),
        "mtp.layer.ffn.down": (1, [128]),
        "layers.1.ffn.router.weight": (0, []),
        "lm_head.weight": (0, [512]),
        "embed.weight": (0, []),
    }
    for rank in range(2):
        held = load(config, directory, {}, rank, 2)
        for name, (dim, sizes) in cuts.items():
            parts = whole[name].split(sizes, dim) if sizes else ()
            want = torch.cat([p.chunk(2, dim)[rank] for p in parts], dim) if sizes else whole[name]
            assert torch.equal(held[name], want), name


def test_a_rank_reads_no_more_than_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_next", num_value_heads=4)
    config = read_model_config(directory)
    read: list[int] = []

    class Files(FileReader):
        def read(self, file: Path, runs: Iterable[Run], device: torch.device | None = None) -> torch.Tensor:
            part = super().read(file, runs, device)
            read.append(part.nbytes)
            return part

    monkeypatch.setattr("compiled_mtp.models.headers.FileReader", Files)
    for rank in range(2):
        read.clear()
        held = load(config, directory, {}, rank, 2)
        # The release and the parameters are in bfloat16, and so are the numbers that were read.
        assert sum(read) == sum(parameter.numel() for parameter in held.values()) * 2


def test_one_rank_holds_the_unchanged_whole(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    assert config.shard(0, 1) is config
    layout = layout_of(config, directory, {})
    assert shard_layout(layout, config, {}, 0, 1) == layout


def test_heads_are_replicated_where_ranks_outnumber_them(tmp_path: Path) -> None:
    config = read_model_config(write_checkpoint(tmp_path, num_q_heads=8, num_kv_heads=4, num_value_heads=8))
    part = config.shard(5, 8)
    assert (part.num_q_heads, part.num_kv_heads, part.world) == (1, 1, 8)
    assert (part.linear_num_key_heads, part.linear_num_value_heads, part.head_vocab_size) == (1, 1, 64)
    assert (part.hidden_size, part.vocab_size) == (config.hidden_size, config.vocab_size)
    # Query heads 2i and 2i + 1 read KV head i.
    assert [rank_range(4, rank, 8)[0] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("changes", "rank", "world", "message"),
    [
        ({"num_q_heads": 3}, 0, 2, "num_q_heads must be a multiple of 2 ranks, got 3; use another number"),
        ({"linear_num_value_heads": 3}, 0, 2, "linear_num_value_heads must be a multiple of 2 ranks, got 3"),
        ({"num_kv_heads": 3}, 0, 2, "num_kv_heads must be a multiple or a divisor of 2 ranks, got 3; use"),
        (
            {"linear_num_key_heads": 3},
            0,
            2,
            "linear_num_key_heads must be a multiple or a divisor of 2 ranks",
        ),
        ({"intermediate_size": 191}, 0, 2, "intermediate_size must be a multiple of 2 ranks, got 191"),
        ({"moe_intermediate_size": 7}, 0, 2, "moe_intermediate_size must be a multiple of 2 ranks, got 7"),
        ({"vocab_size": 511}, 0, 2, "vocab_size must be a multiple of 2 ranks, got 511; use another"),
        ({}, 2, 2, "rank must be 0 to 1, got 2; pass the rank's own number"),
        ({}, 0, 0, "world must be at least 1, got 0; pass the number of ranks"),
        ({"world": 2}, 0, 2, "shard must start from a whole model, got one rank of 2"),
    ],
)
def test_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], rank: int, world: int, message: str
) -> None:
    config = replace(read_model_config(write_checkpoint(tmp_path)), **changes)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        config.shard(rank, world)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        (
            "moe",
            {},
            r"^layers.0.ffn.(gate_up|down) must be cut at its blocks of 128, got rows \d+ to \d+ and ",
        ),
        (
            "dense",
            {"num_value_heads": 2, "intermediate_size": 384},
            r"^layers.0.ffn.(gate_up|down).weight must",
        ),
    ],
)
def test_a_cut_through_a_block_is_refused_on_every_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sizes: dict[str, int],
    message: str,
    rank: int,
) -> None:
    monkeypatch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: True)
    directory = write_checkpoint(tmp_path, **(dict(FP8_FAMILIES)[family] | sizes))
    config = read_model_config(directory)
    formats = read_formats(config, directory, CPU, "w8a16")
    assert set(formats.values()) == {FP8}
    with pytest.raises(ValueError, match=message):
        shard_layout(layout_of(config, directory, formats), config, formats, rank, 2)
