"""What ranks cannot do is refused before any of them starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.parallel import leader
from compiled_mtp.parallel.limits import check_ranks
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.parallel.rank_engines import config_of, spec_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("limits"), tokenizer=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, r"tensor_parallel must be 1, 2, 4 or 8, got 3; use another number of ranks"),
        ({"tensor_parallel": True}, "tensor_parallel must not be a bool"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 8}, "^tensor_parallel must be at most 4 on a CPU, got 8; use fewer ranks"),
        ({"world": 4}, "^num_q_heads must be a multiple of 4 ranks, got 2; use another number of ranks"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_any_starts(
    directory: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.delattr(leader, "Ranks")
    with pytest.raises(ValueError, match=message):
        Engine(config_of(directory, **options))


@pytest.mark.parametrize(
    ("family", "sizes", "options", "message"),
    [
        ("moe", {}, {}, r"^layers.0.ffn.gate_up must be cut at its blocks of 128, got rows 0 to 64 and"),
        (
            "dense",
            {"num_value_heads": 4, "num_q_heads": 4},
            {"world": 4},
            r"^layers.0.ffn.gate_up.weight must be cut at its blocks of 128, got rows 0 to 64 and columns 0",
        ),
    ],
)
def test_cut_groups_are_refused_before_any_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    message: str,
) -> None:
    """A group of 128 columns has one factor of each row."""
    monkeypatch.delattr(leader, "Ranks")
    heads = {"num_q_heads": 4, "num_value_heads": 4}
    directory = write_checkpoint(tmp_path, **(dict(FP8_FAMILIES)[family] | heads | sizes))
    with pytest.raises(ValueError, match=message):
        Engine(config_of(directory, **options))


# What two GPUs can hold.
FITS = {
    "num_q_heads": 8,
    "head_dim": 64,
    "num_kv_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 64,
    "intermediate_size": 256,
}


def have_gpus(monkeypatch: pytest.MonkeyPatch, current: int = 0) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.current_device", lambda: current)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("compiled_mtp.models.draft_weights.memory_of", lambda device: 80 << 30)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"world": 4}, {}, "^tensor_parallel must be at most the 2 GPUs that are there, got 4; use fewer"),
        ({"current": 1}, {}, "^device must be the first GPU with several ranks, got cuda:1; leave the first"),
        (
            {"communicator": "gloo"},
            {},
            "^communicator must be symmetric or nccl on GPUs, got gloo; leave it out",
        ),
        ({"graph_mode": "reduce-overhead"}, {}, "^graph_mode must be replay with several ranks, got reduce"),
        (
            {"reference_ops": "linear"},
            {},
            "^reference_ops must be empty with several ranks on GPUs, got .'li",
        ),
        ({}, {"hidden_size": 129}, "^hidden_size must be a multiple of 2 ranks, got 129; use another number"),
        ({}, {}, "^intermediate_size must have at least 2 K splits, got 1 of 192 columns; use fewer"),
    ],
)
def test_what_ranks_on_gpus_cannot_do_is_refused(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    have_gpus(monkeypatch, options.get("current", 0))
    model = replace(read_model_config(directory), **(FITS | {"intermediate_size": 192} | changes))
    given = {name: value for name, value in options.items() if name != "current"}
    with pytest.raises(ValueError, match=message):
        check_ranks(spec_of(config_of(directory, device="cuda", **given), model), None)


def test_on_gpus_compiled_ranks_may_choose_depths(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start captures all of them, on every rank."""
    have_gpus(monkeypatch)
    model = replace(read_model_config(directory), **FITS)
    check_ranks(spec_of(config_of(directory, device="cuda", mtp_step="auto", compile="on"), model), None)


def test_a_communicator_for_gpus_is_refused_on_a_cpu(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(leader, "Ranks")
    with pytest.raises(
        ValueError, match=r"^communicator must be auto or gloo on a CPU, got nccl; leave it out"
    ):
        Engine(config_of(directory, communicator="nccl"))


def fill_nothing(parameters: Mapping[str, torch.Tensor]) -> None:
    pass


def test_fills_that_ranks_cannot_import_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(leader, "Ranks")
    with pytest.raises(ValueError, match=r"^fill must be a function that ranks can import, got <function"):
        Engine(config_of(directory), fill=lambda parameters: None)
    # As one of a script: it can be pickled, but only the script finds it.
    monkeypatch.setattr(fill_nothing, "__module__", "__main__")
    monkeypatch.setattr("__main__.fill_nothing", fill_nothing, raising=False)
    with pytest.raises(ValueError, match=r"^fill must be a function that ranks can import, got <function"):
        Engine(config_of(directory), fill=fill_nothing)
