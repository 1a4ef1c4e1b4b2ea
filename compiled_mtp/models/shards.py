"""What a rank of several holds of every parameter, and the layout of its pieces.

Heads, FFN widths and the head's vocabulary are divided; a merged weight is cut in each of its parts, so that
a rank's parameter has the form of a whole one. What comes before a norm (o_proj, out_proj, down) is cut by
columns: the ranks' products add up; the down of experts with quantised rows by rows. Norms, embedding, router
and fc are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compiled_mtp.errors import check, fail
from compiled_mtp.model_config import ModelConfig, rank_range
from compiled_mtp.models.layout import Layout, Stored, WeightShard
from compiled_mtp.models.weight_format import PLAIN, Formats
from compiled_mtp.ops import int4


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a parameter: ranges of its rows, one after another, and one of its columns.

    A range is a first index and one past the last. None for all.
    """

    rows: tuple[tuple[int, int], ...] | None = None
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Cutter:
    """Cuts the parameters of the whole model `config` for `rank` of `world` ranks."""

    config: ModelConfig
    rank: int
    world: int

    def cut(self, parameter: str, formats: Formats) -> Cut:
        """What the rank holds of `parameter`, by its full name. Raises ValueError as `ModelConfig.shard`."""
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
            case "gate_up":
                return self._rows(width, width)
            case "o_proj":
                return self._columns(q)
            case "out_proj":
                return self._columns(value)
            case "down" if c.is_moe and formats.get(parameter, PLAIN).quantizes_rows:
                # Of quantised rows all ranks have all hidden values, and each makes some of the sums.
                return self._rows((c.hidden_size, 1))
            case "down":
                return self._columns(width)
        return Cut()

    def _rows(self, *parts: tuple[int, int]) -> Cut:
        """Of parts that lie one after another, each (count, rows of one)."""
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
    """The parameter that holds rows of a weight for prompts, where `parameter` holds columns of it."""
    module, _, name = parameter.rpartition(".")
    return f"{module}.prompt_{name}"


def with_prompt_rows(formats: Formats) -> Formats:
    """`formats`, and those of the rows for prompts of what is cut by columns: the same."""
    ends = ("o_proj.weight", "out_proj.weight", "down.weight", "ffn.down")
    cut = [name for name in formats if name.endswith(ends)]
    return {**formats, **{prompt_name(name): formats[name] for name in cut}}


def shard_layout(
    layout: Layout, config: ModelConfig, formats: Formats, rank: int, world: int, *, prompt_rows: bool = False
) -> dict[str, Stored]:
    """The layout of one rank: of every stored tensor of the whole model's `layout` the pieces it holds.

    Shapes stay those in the files. prompt_rows: of what is cut by columns it also holds some rows, as
    `prompt_name` calls them. Raises ValueError by name for sizes that `world` does not divide, and for
    a cut through a block of a parameter that is kept in a format with blocks.
    """
    config.shard(rank, world)
    if world == 1:
        return dict(layout)
    cutter = Cutter(config, rank, world)
    cuts: dict[str, Cut] = {}
    sharded = {}
    for name, stored in layout.items():
        pieces: list[WeightShard] = []
        for piece in stored.pieces:
            if piece.parameter not in cuts:
                cuts[piece.parameter] = cutter.cut(piece.parameter, formats)
            pieces += _held(piece, cuts[piece.parameter])
            if prompt_rows and cuts[piece.parameter].columns:
                own = rank_range(stored.shape[-2], rank, world)
                pieces += _held(replace(piece, parameter=prompt_name(piece.parameter)), Cut(rows=(own,)))
        sharded[name] = replace(stored, pieces=tuple(pieces))
        for piece in pieces:
            _check_blocks(piece, stored.shape, formats)
    return sharded


def _held(piece: WeightShard, cut: Cut) -> Iterator[WeightShard]:
    """The parts of a whole parameter's piece that lie in what a rank holds, placed in its own parameter."""
    local = 0
    for begin, end in cut.rows or ((0, piece.start + piece.rows),):
        first, last = max(begin, piece.start), min(end, piece.start + piece.rows)
        if first < last:
            start, source = local + first - begin, piece.source + first - piece.start
            yield replace(piece, start=start, rows=last - first, source=source, columns=cut.columns)
        local += end - begin


def _check_blocks(piece: WeightShard, shape: tuple[int, ...], formats: Formats) -> None:
    form = formats.get(piece.parameter)
    if form is None:
        return
    columns = piece.columns or (0, shape[-1])
    rows = (piece.source, piece.source + piece.rows)
    edges = [(column, shape[-1]) for column in columns]
    # Rows that are multiplied out have no factors, but most make columns that are quantised in groups.
    if form.group:
        is_whole = piece.start % int4.ROWS == piece.rows % int4.ROWS == 0
        got, remedy = f"rows {rows[0]} to {rows[1]}", "use fewer ranks"
        check(is_whole, piece.parameter, f"be cut at its blocks of {int4.ROWS} rows", got, remedy)
    elif form.has_factors or not piece.parameter.endswith("ffn.down"):
        edges += [(row, shape[-2]) for row in rows] + [(piece.start, -1)]
    if any(edge % form.block and edge != size for edge, size in edges):
        got = f"rows {rows[0]} to {rows[1]} and columns {columns[0]} to {columns[1]}"
        remedy = "use fewer ranks or a release in another format"
        raise fail(piece.parameter, f"be cut at its blocks of {form.block}", got, remedy)
