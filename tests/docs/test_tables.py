"""The tables of docs/models.md and docs/migrating.md agree with the code."""

from __future__ import annotations

import re

import pytest
import torch

from compiled_mtp.benchmarks.released_shapes import LAYERS, model_config
from compiled_mtp.cli import chat, run
from compiled_mtp.models.weight_format import Formats
from compiled_mtp.models.weights import read_formats
from compiled_mtp.server.serve import make_parser
from compiled_mtp.terminal.other_names import OTHER_NAMES, remedy_for
from tests.checkpoints import count_weights
from tests.docs.error_texts import ROOT

MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
MIGRATING = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
# The kinds of weights of the columns of the memory table.
KINDS: tuple[dict[str, object], ...] = (
    {},
    {"quantized": True},
    {"four_bit_group": 128},
    {"scaled_codes": "Q4_K_M"},
)


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of the tables' rows without their headings."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in found]


def test_the_memory_of_each_shape_is_what_the_loader_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU that reads every format.
    monkeypatch.setattr("compiled_mtp.models.weight_format.reads_codes", lambda device: True)
    monkeypatch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: True)
    rows = {cells[0].lower(): cells[1:] for cells in rows_of(MODELS.partition("## GPU memory")[2])[1:]}
    assert rows.keys() == LAYERS.keys()
    for shape, cells in rows.items():
        for kind, cell in zip(KINDS, cells[:4], strict=True):
            model = model_config(shape, **kind)
            recipe = "w8a16" if model.quantized else None
            formats: Formats = read_formats(model, None, torch.device("cpu"), recipe)
            count = count_weights(model, {}, formats, torch.bfloat16)
            assert cell == f"{count / 2**30:.1f}", (shape, kind)
        model = model_config(shape)
        per_token = (model.num_attention_layers + 1) * 2 * model.num_kv_heads * model.head_dim * 2
        assert cells[4] == f"{per_token * 1000 / 2**20:.0f}"
        heads = model.num_gdn_layers * model.linear_num_value_heads
        state = heads * model.linear_key_head_dim * model.linear_value_head_dim * 4
        assert cells[5] == f"{state / 2**20:.0f}"


def test_the_flags_of_other_engines_lead_to_flags_that_exist() -> None:
    parsers = (make_parser(), run.make_parser(), chat.make_parser())
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    rows = rows_of(MIGRATING)
    rows = [cells for cells in rows if cells[0].startswith("`") and len(cells) == 2]
    assert len(rows) >= 50
    # Links and other programs' commands aside.
    named = {
        flag
        for cells in rows
        for code in re.findall(r"`([^`]*)`", cells[1])
        if not code.startswith("hf ")
        for flag in re.findall(r"--[a-z][a-z-]*", code)
    }
    assert len(named) > 25
    assert sorted(named - known) == []


def test_the_commands_know_the_flags_of_other_engines_too() -> None:
    known = {flag for parser in (make_parser(), run.make_parser()) for flag in parser._option_string_actions}
    documented = {}
    for cells in rows_of(MIGRATING):
        for code in re.findall(r"`(-[^`]*)`", cells[0]):
            documented[code.split()[0]] = cells[1]
    assert OTHER_NAMES.keys() <= documented.keys()
    for flag, cell in documented.items():
        if flag in known:
            assert flag not in OTHER_NAMES
            continue
        remedy = remedy_for(flag, known)
        assert remedy is not None, flag
        other = OTHER_NAMES[flag]
        if other.startswith("-"):
            assert f"`{other}" in cell, flag
            assert other.split()[0] in known, flag
        else:
            assert re.search("leave it out|requests|" + other.split()[0], remedy), flag
