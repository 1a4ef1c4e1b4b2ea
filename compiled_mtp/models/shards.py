"""Divides every parameter among ranks, and makes the layout of one rank's shards.

Ranks divide heads, FFN widths and the head's vocabulary. Each part of a merged weight (q, k, v) is divided
separately, so that a rank's parameter has the form of the whole one. Weights before a norm (o_proj, out_proj,
down) are divided by columns, and the ranks' products are added; the down of experts is divided by rows.
Norms, embedding, router and fc are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compiled_mtp.errors import check, fail
from compiled_mtp.model_config import ModelConfig, rank_range
from compiled_mtp.models.layout import Layout, Stored, WeightShard
from compiled_mtp.models.weight_format import Formats
from compiled_mtp.ops import int4


@dataclass(frozen=True)
class Cut:
    """The share of a parameter that a rank holds: ranges of its rows, in order, and one range of its columns.

    A range is the first index and one past the last; None for all.
    """

    rows: tuple[tuple[int, int], ...] | None = None
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Cutter:
    """Divides the parameters of the whole model `config`, for `rank` of `world` ranks."""

    config: ModelConfig
    rank: int
    world: int

    def cut(self, parameter: str, formats: Formats) -> Cut:
        """The rank's share of `parameter`, a full name. Raises ValueError as `ModelConfig.shard` does."""
        c = self.config
        q, kv = (c.num_q_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
        key = (c.linear_num_key_heads, c.linear_key_head_dim)
        value = (c.linear_num_value_heads, c.linear_value_head_dim)
        gate = (c.linear_num_value_heads, 1)
        width = (c.moe_intermediate_size if c.is_moe else c.intermediate_size, 1)
        gates = () if parameter in formats else (gate, gate)
        match parameter.removesuffix(".weight").rpartition(".")[2]:
            case "lm_head":
                return self._rows((c.vocab_size, 1))
            case "qkv":
                return self._rows((c.num_q_heads, 2 * c.head_dim), kv, kv)
            case "in_proj":
                return self._rows(key, key, value, value, *gates)
            case "ba_proj":
                return self._rows(gate, gate)
            case "conv_weight":
                return self._rows(key, key, value)
            case "a_log" | "dt_bias":
                return self._rows(gate)
            case "gate_up" | "shared_gate_up":
                return self._rows(width, width)
            case "o_proj":
                return self._columns(q)
            case "out_proj":
                return self._columns(value)
            case "down" | "shared_down" if c.is_moe:
                # Every rank gathers all hidden values and computes some of the sums.
                return self._rows((c.hidden_size, 1))
            case "down":
                return self._columns(width)
        return Cut()

    def _rows(self, *parts: tuple[int, int]) -> Cut:
        """The rank's rows of consecutive parts, each (number of units, rows per unit)."""
        ranges, first = [], 0
        for count, size in parts:
            begin, end = rank_range(count, self.rank, self.world)
            ranges.append((first + begin * size, first + end * size))
            first += count * size
        return Cut(rows=tuple(ranges))

    def _columns(self, part: tuple[int, int]) -> Cut:
        begin, end = rank_range(part[0], self.rank, self.world)
        return Cut(columns=(begin * part[1], end * part[1]))


def prompt_name(parameter: str) -> str:
    """The name of the parameter with a weight's rows for prompts; `parameter` holds columns of the weight."""
    module, _, name = parameter.rpartition(".")
    return f"{module}.prompt_{name}"


def with_prompt_rows(formats: Formats) -> Formats:
    """`formats` with entries for the prompt rows of weights that are divided by columns, in equal formats."""
    ends = ("o_proj.weight", "out_proj.weight", "down.weight")
    cut = [name for name in formats if name.endswith(ends)]
    return {**formats, **{prompt_name(name): formats[name] for name in cut}}


def shard_layout(
    layout: Layout, config: ModelConfig, formats: Formats, rank: int, world: int, *, prompt_rows: bool = False
) -> dict[str, Stored]:
    """The layout of one rank: for every stored tensor of the whole model's `layout` the shards it holds.

    Shapes stay those in the files. prompt_rows: the rank also holds some rows of the weights that are divided
    by columns, in parameters named by `prompt_name`. Raises ValueError, naming the size or parameter, for
    sizes that `world` does not divide, and for a shard that would end inside a block of a format with blocks.
    """
    config.shard(rank, world)
    if world == 1:
        return dict(layout)
    cutter = Cutter(config, rank, world)
    cuts: dict[str, Cut] = {}
    sharded = {}
    for name, stored in layout.items():
        shards: list[WeightShard] = []
        for shard in stored.shards:
            if shard.parameter not in cuts:
                cuts[shard.parameter] = cutter.cut(shard.parameter, formats)
            shards += _cut_shard(shard, cuts[shard.parameter])
            if prompt_rows and cuts[shard.parameter].columns:
                own = rank_range(stored.shape[-2], rank, world)
                shards += _cut_shard(replace(shard, parameter=prompt_name(shard.parameter)), Cut(rows=(own,)))
        sharded[name] = replace(stored, shards=tuple(shards))
        for shard in shards:
            _check_blocks(shard, stored.shape, formats)
    return sharded


def _cut_shard(shard: WeightShard, cut: Cut) -> Iterator[WeightShard]:
    """The overlaps of a whole parameter's shard with a rank's share, at the rows of the rank's parameter."""
    local = 0
    for begin, end in cut.rows or ((0, shard.start + shard.rows),):
        first, last = max(begin, shard.start), min(end, shard.start + shard.rows)
        if first < last:
            start, source = local + first - begin, shard.source + first - shard.start
            yield replace(shard, start=start, rows=last - first, source=source, columns=cut.columns)
        local += end - begin


def _check_blocks(shard: WeightShard, shape: tuple[int, ...], formats: Formats) -> None:
    form = formats.get(shard.parameter)
    if form is None or not form.block:
        return
    columns = shard.columns or (0, shape[-1])
    rows = (shard.source, shard.source + shard.rows)
    edges = [(column, shape[-1]) for column in columns]
    # Weights that are multiplied out have no factors, but their output columns, which are their rows, are
    # quantised in groups by the next product; the output columns of ffn.down are not.
    if form.group:
        is_whole = shard.start % int4.ROWS == shard.rows % int4.ROWS == 0
        got, remedy = f"rows {rows[0]} to {rows[1]}", "use fewer ranks"
        check(is_whole, shard.parameter, f"be cut at its blocks of {int4.ROWS} rows", got, remedy)
    elif form.has_factors or not shard.parameter.endswith("ffn.down"):
        edges += [(row, shape[-2]) for row in rows] + [(shard.start, -1)]
    if any(edge % form.block and edge != size for edge, size in edges):
        got = f"rows {rows[0]} to {rows[1]} and columns {columns[0]} to {columns[1]}"
        remedy = "use fewer ranks or a release in another format"
        raise fail(shard.parameter, f"be cut at its blocks of {form.block}", got, remedy)
