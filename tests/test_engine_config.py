"""The settings of an engine: defaults, sources, what is refused, and every message."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.config import EngineConfig, as_config, defaults
from compiled_mtp.models.hf_config import read_model_config
from tests.checkpoints import write_checkpoint
from tests.test_config import edit
from tests.tiny import tiny_config


def test_engine_defaults() -> None:
    c = EngineConfig()
    assert c.model.name == "default_model"
    assert (c.device, c.dtype, c.kv_dtype, c.compile, c.graph_mode) == ("auto",) * 5
    assert (c.mtp_step, c.max_batch, c.block_size) == ("auto", None, 64)
    assert (c.prefix_cache, c.prefix_cache_gb, c.reference_ops) == (True, None, ())
    unset = ("max_model_len", "num_blocks", "graph_cache", "draft_vocab", "seed", "synthetic_acceptance")
    unset += ("max_in_flight", "num_threads", "offload_gb", "prefill_chunk")
    assert [getattr(c, name) for name in unset] == [None] * 10


@pytest.mark.parametrize(
    ("given", "device", "hidden_size", "chunk", "busy"),
    [
        # 27B, 9B, 4B and narrower models.
        ({}, "cuda", 5120, 2048, 512),
        ({}, "cuda", 4096, 2048, 512),
        ({}, "cuda", 2560, 4096, 512),
        ({}, "cuda", 1024, 4096, 512),
        ({}, "cpu", 1024, 512, 512),
        ({"block_size": 48}, "cuda", 5120, 1920, 384),
        ({"block_size": 2112}, "cuda", 5120, 2112, 2112),
        ({"prefill_chunk": 256}, "cuda", 2560, 256, 256),
        ({"prefill_chunk": 8192}, "cuda", 5120, 8192, 8192),
        ({"prefill_chunk": 4096}, "cpu", 5120, 4096, 4096),
    ],
)
def test_chunks_follow_the_device_and_the_width(
    given: dict[str, int], device: str, hidden_size: int, chunk: int, busy: int
) -> None:
    """Whole blocks and whole chunks of GDN layers; short on a GPU while other requests decode."""
    config, model = EngineConfig(**given), replace(tiny_config(), hidden_size=hidden_size)
    chunks = (
        defaults.resolve_prefill_chunk(config, device, model),
        defaults.resolve_busy_chunk(config, device, model),
    )
    assert chunks == (chunk, busy)


def test_keyword_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_MTP_MTP_STEP", "2")
    monkeypatch.setenv("COMPILED_MTP_MAX_BATCH", "4")
    monkeypatch.setenv("COMPILED_MTP_REFERENCE_OPS", "linear, gdn_verify")
    monkeypatch.setenv("COMPILED_MTP_NUM_BLOCKS", "")
    c = EngineConfig(mtp_step=1)
    assert (c.mtp_step, c.max_batch, c.num_blocks) == (1, 4, None)
    assert c.reference_ops == ("linear", "gdn_verify")


def test_lists_are_split_at_commas_also_within_a_repeated_flag() -> None:
    c = EngineConfig(batch_sizes=["1,4", "8"], reference_ops=["linear, gdn_verify", "sample"])
    assert c.batch_sizes == (1, 4, 8)
    assert c.reference_ops == ("linear", "gdn_verify", "sample")
    assert EngineConfig(batch_sizes=(2, "4")).batch_sizes == (2, 4)


@pytest.mark.parametrize(
    "name", [name for name, field in EngineConfig.model_fields.items() if field.annotation is not bool]
)
def test_a_bool_is_no_number(name: str) -> None:
    for value in (True, [True]) if name == "batch_sizes" else (True,):
        with pytest.raises(ValueError, match=f"^{name} must not be a bool, got .?True.?; give its value"):
            EngineConfig(**{name: value})


def test_an_engine_takes_the_settings_as_they_are() -> None:
    path = Path("somewhere")
    assert as_config(None, {}) == EngineConfig()
    assert as_config("somewhere", {"mtp_step": 3}) == EngineConfig(model=path, mtp_step=3)
    assert as_config(path, {}) == EngineConfig(model=path)
    assert as_config(None, {"model": path, "max_batch": 2}) == EngineConfig(model=path, max_batch=2)
    config = EngineConfig(mtp_step=1)
    assert as_config(config, {}) is config
    for given, settings, message in (
        (
            config,
            {"mtp_step": 3},
            r"mtp_step must be a field of the EngineConfig, got it beside one; write EngineC",
        ),
        (path, {"model": "x"}, "model must be given once, got somewhere and x; leave one out"),
        (None, {"mtp_stepp": 3}, "config must name settings only, got mtp_stepp; known are"),
        (None, {"mtp_step": 9}, "mtp_step must be auto or 0 to 7, got 9; choose one"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            as_config(given, settings)


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().mtp_step = 1


ENGINE_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"mtp_step": 8}, "mtp_step must be auto or 0 to 7, got 8; choose one"),
    ({"mtp_step": -1}, "mtp_step must be auto or 0 to 7, got -1; choose one"),
    ({"max_batch": 0}, "max_batch must be greater than or equal to 1, got 0; raise it"),
    ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got tpu; choose one; cuda:0 is"),
    ({"device": "cuda:x"}, "device must be auto, cpu, cuda or cuda:N, got cuda:x"),
    ({"memory_utilization": 0}, "memory_utilization must be greater than 0, got 0"),
    ({"memory_utilization": 1.5}, "memory_utilization must be less than or equal to 1, got 1.5"),
    (
        {"dtype": "float16"},
        "dtype must be 'auto', 'float32' or 'bfloat16', got 'float16'; choose one of them",
    ),
    (
        {"kv_dtype": "bfloat16"},
        "kv_dtype must be 'auto' or 'float8_e4m3fn', got 'bfloat16'; choose one of them",
    ),
    (
        {"max_model_len": 1},
        "max_model_len must be greater than or equal to 2, got 1; raise it",
    ),
    ({"block_size": 24}, "block_size must be a multiple of 16, got 24; round it"),
    ({"num_blocks": 1}, "num_blocks must be greater than or equal to 2, got 1; raise it"),
    (
        {"prefill_chunk": 100},
        "prefill_chunk must be a multiple of 64, got 100; round it",
    ),
    (
        {"prefill_chunk": 64 * 10**13},
        "prefill_chunk must be less than or equal to 8192, got 640000000000000; lower it",
    ),
    (
        {"block_size": 384, "prefill_chunk": 512},
        "prefill_chunk must be a multiple of block_size (384), got 512; change one of the two",
    ),
    (
        {"block_size": 2064},
        "block_size must divide a multiple of 64 that is at most 8192, got 2064; give a power of two",
    ),
    ({"prefix_cache_gb": 0}, "prefix_cache_gb must be greater than 0, got 0; raise it"),
    (
        {"offload_gb": 1e300},
        f"offload_gb must be less than or equal to {2**20}, got 1e+300; lower it",
    ),
    ({"offload_gb": math.nan}, "offload_gb must be a finite number, got nan; give a number"),
    ({"offload_gb": "nan"}, "offload_gb must be a finite number, got 'nan'; give a number"),
    ({"prefix_cache_gb": math.inf}, "prefix_cache_gb must be a finite number, got inf; give a number"),
    ({"model": 5}, "model must be a valid path, got 5; give a path"),
    ({"graph_cache": []}, "graph_cache must be a valid path, got []; give a path"),
    ({"draft_vocab": "~nobody-here/x"}, "draft_vocab must be a path, got ~nobody-here/x; Could not"),
    ({"graph_cache": "~nobody-here/x"}, "graph_cache must be a path, got ~nobody-here/x; Could not"),
    ({"compile": "maybe"}, "compile must be 'auto', 'off' or 'on', got 'maybe'; choose one of them"),
    (
        {"graph_mode": "x"},
        "graph_mode must be 'auto', 'reduce-overhead', 'replay' or 'off', got 'x'; choose one of them",
    ),
    (
        {"draft_vocab": 0},
        "draft_vocab must be a number of ids, at least 1, or a file of ids, got 0; leave it out for all ids",
    ),
    ({"seed": 2**63}, f"seed must be less than {2**63}, got {2**63}; lower it"),
    (
        {"synthetic_acceptance": 1.5},
        "synthetic_acceptance must be less than or equal to 1, got 1.5; lower it",
    ),
    (
        {"max_in_flight": 2},
        "max_in_flight must be less than or equal to 1, got 2; lower it",
    ),
    (
        {"num_threads": 10**6},
        f"num_threads must be at most {os.cpu_count()}, the cores of this machine, got 1000000; lower it",
    ),
    ({"num_threads": 0}, "num_threads must be greater than or equal to 1, got 0; raise it"),
    (
        {"max_batch": "x"},
        "max_batch must be a valid integer, unable to parse string as an integer, got 'x'; give a",
    ),
    (
        {"offload_gb": "x"},
        "offload_gb must be a valid number, unable to parse string as a number, got 'x'; give a",
    ),
    (
        {"prefix_cache": 3},
        "prefix_cache must be a valid boolean, unable to interpret input, got 3; give true or",
    ),
    ({"mtp_steps": 3}, "config must name settings only, got mtp_steps; known are ['allow_extra_tensors',"),
]


@pytest.mark.parametrize(
    ("kwargs", "message"), ENGINE_REFUSALS, ids=[next(iter(k)) for k, _ in ENGINE_REFUSALS]
)
def test_engine_refusals(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        EngineConfig(**kwargs)
    assert "\n" not in str(error.value)
    # The help text describes a setting and is not a remedy.
    described = {field.description for field in EngineConfig.model_fields.values()}
    assert not any(one and one in str(error.value) for one in described)


def test_one_line_per_mistake() -> None:
    with pytest.raises(ValueError, match="mtp_step must") as error:
        EngineConfig(mtp_step=9, max_batch="x")
    assert [line.split()[0] for line in str(error.value).splitlines()] == ["mtp_step", "max_batch"]


def test_unknown_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_MTP_STEPS", "3")
    with pytest.raises(
        ValueError, match=r"environment must name settings only, got \['COMPILED_MTP_STEPS'\]"
    ):
        EngineConfig()


def test_resolved_numbers(tmp_path: Path) -> None:
    model = read_model_config(write_checkpoint(tmp_path))
    assert defaults.resolve_dtype(EngineConfig(), "cpu", model) == "float32"
    assert defaults.resolve_dtype(EngineConfig(), "cuda", model) == "bfloat16"
    assert defaults.resolve_dtype(EngineConfig(dtype="bfloat16"), "cpu", model) == "bfloat16"
    assert defaults.resolve_max_in_flight(EngineConfig(), "cpu") == 0
    assert defaults.resolve_max_in_flight(EngineConfig(), "cuda") == 1
    assert defaults.resolve_max_in_flight(EngineConfig(max_in_flight=1), "cpu") == 1
    assert defaults.resolve_max_model_len(EngineConfig(), model) == 4096
    assert defaults.resolve_max_model_len(EngineConfig(max_model_len=100), model) == 100
    with pytest.raises(
        ValueError, match="max_model_len must be at most 4096, the checkpoint's limit, got 5000"
    ):
        defaults.resolve_max_model_len(EngineConfig(max_model_len=5000), model)
    edit(tmp_path, {"max_position_embeddings": 262144, "dtype": "float16"})
    large = read_model_config(tmp_path)
    assert defaults.resolve_max_model_len(EngineConfig(), large) == 262144
    with pytest.raises(
        ValueError, match="dtype must be float32 or bfloat16, got float16 from the checkpoint"
    ):
        defaults.resolve_dtype(EngineConfig(), "cuda", large)


def test_configuration_does_not_import_torch() -> None:
    code = "import sys, compiled_mtp.config; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("name", ["model", "graph_cache", "draft_vocab"])
def test_a_home_directory_is_expanded_in_every_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert getattr(EngineConfig(**{name: "~/file"}), name) == Path("/home/somebody/file")
    with pytest.raises(ValueError, match=f"{name} must be a path, got ~nobody-of-this-name/file; "):
        EngineConfig(**{name: "~nobody-of-this-name/file"})
