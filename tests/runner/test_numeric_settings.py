"""torch's numeric settings, read in one process and applied in another."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from compiled_mtp.runner.numeric_settings import NumericSettings

ROOT = Path(__file__).parents[2]
# Each change has its own process, since it sets process-wide state.
CHANGES = {
    "float32_matmul_precision": 'torch.set_float32_matmul_precision("medium")',
    "fp32_precision": 'torch.backends.fp32_precision = "tf32"',
    "mkldnn_matmul_fp32_precision": 'torch.backends.mkldnn.matmul.fp32_precision = "bf16"',
    "mkldnn_conv_fp32_precision": 'torch.backends.mkldnn.conv.fp32_precision = "bf16"',
    "mkldnn_rnn_fp32_precision": 'torch.backends.mkldnn.rnn.fp32_precision = "bf16"',
    "mkldnn_enabled": "torch.backends.mkldnn.enabled = False",
    "mkldnn_deterministic": "torch.backends.mkldnn.set_flags(_deterministic=True)",
    "mkldnn_fp32_precision": 'torch.backends.mkldnn.set_flags(_fp32_precision="tf32")',
    "cuda_matmul_fp32_precision": "torch.backends.cuda.matmul.allow_tf32 = True",
    "cuda_fp32_precision": 'torch.backends.cudnn.fp32_precision = "tf32"',
    "cuda_matmul_allow_fp16_accumulation": "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
    "cuda_matmul_allow_fp16_reduced_precision_reduction": (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False"
    ),
    "cuda_matmul_allow_bf16_reduced_precision_reduction": (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)"
    ),
    "cudnn_enabled": "torch.backends.cudnn.enabled = False",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "cudnn_deterministic": "torch.backends.cudnn.deterministic = True",
    "cudnn_conv_fp32_precision": 'torch.backends.cudnn.conv.fp32_precision = "ieee"',
    "cudnn_rnn_fp32_precision": 'torch._C._set_fp32_precision_setter("cuda", "rnn", "ieee")',
    "num_threads": "torch.set_num_threads(3)",
    "default_dtype": "torch.set_default_dtype(torch.float64)",
    "flush_denormal": "torch.set_flush_denormal(True)",
    "deterministic_algorithms": 'torch.set_deterministic_debug_mode("error")',
    "deterministic_algorithms_warn_only": 'torch.set_deterministic_debug_mode("warn")',
}
# torch takes these only on a GPU, and on a CPU with arithmetic in float16.
NOT_HERE = {"cuda_preferred_blas_library", "cpu_allow_fp16_reduced_precision_reduction"}
# Reads the settings after each change of argv[1]; forked, since importing torch is slow.
EACH = """
import dataclasses, json, os, sys, torch
from compiled_mtp.runner.numeric_settings import NumericSettings
for change in json.loads(sys.argv[1]):
    if not os.fork():
        exec(change)
        print(json.dumps(dataclasses.asdict(NumericSettings.read())), flush=True)
        os._exit(0)
    os.wait()
"""
# Applies each of argv[1]'s records and reads the settings back.
APPLIED = """
import dataclasses, json, os, sys
from compiled_mtp.runner.numeric_settings import NumericSettings
for record in json.loads(sys.argv[1]):
    if not os.fork():
        record = {name: tuple(v) if type(v) is list else v for name, v in record.items()}
        NumericSettings(**record).apply()
        print(json.dumps(dataclasses.asdict(NumericSettings.read())), flush=True)
        os._exit(0)
    os.wait()
"""


def printed(code: str, argument: object) -> list[dict[str, object]]:
    command = [sys.executable, "-c", code, json.dumps(argument)]
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def changed() -> dict[str, dict[str, object]]:
    """Return the settings after each change, and under "" those without a change."""
    return dict(zip(["", *CHANGES], printed(EACH, ["", *CHANGES.values()]), strict=True))


def test_every_setting_of_torch_is_seen(changed: dict[str, dict[str, object]]) -> None:
    unset = changed[""]
    assert set(unset) == {field.name for field in fields(NumericSettings)} == {*CHANGES, *NOT_HERE}
    assert [name for name in CHANGES if changed[name][name] == unset[name]] == []


def test_what_is_read_in_one_process_is_in_effect_in_another(changed: dict[str, dict[str, object]]) -> None:
    assert printed(APPLIED, list(changed.values())) == list(changed.values())


def test_combined_settings_reach_another_process() -> None:
    """Also settings made by torch's two interfaces for float32 precision, one after the other."""
    rng = random.Random(0)
    # Applying deterministic algorithms imports the compiler, which takes seconds.
    quick = [change for name, change in CHANGES.items() if "algorithms" not in name]
    changes = ["; ".join(rng.sample(quick, 5)) for _ in range(48)]
    found = printed(EACH, changes)
    assert printed(APPLIED, found) == found


def test_apply_leaves_its_own_settings_as_they_are() -> None:
    settings = NumericSettings.read()
    settings.apply()
    assert NumericSettings.read() == settings
    assert settings.num_threads == torch.get_num_threads()
    assert json.loads(json.dumps(asdict(settings)))["default_dtype"] == "float32"


def test_the_setting_that_differs_is_named() -> None:
    settings = NumericSettings.read()
    assert settings.difference(settings) is None
    other = replace(settings, mkldnn_enabled=not settings.mkldnn_enabled)
    assert settings.difference(other) == "mkldnn_enabled"
