"""Engines of several ranks for tests, and a look at their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.parallel.leader import LeadRunner
from compiled_mtp.parallel.ranks import _Processes
from compiled_mtp.request import SamplingParams
from compiled_mtp.runner.spec import EngineSpec, resolve

# What is due after a rank is lost.
MOST_S = 10.0
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True)
GUIDED = SamplingParams(max_tokens=8, temperature=0.8, seed=4, guided_regex="[ab]{12}")


def config_of(directory: Path, world: int = 2, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "block_size": 16,
        "prefill_chunk": 64,
        "max_model_len": 128,
        "num_blocks": 20,
        "max_batch": 2,
        "num_threads": 1,
        "offload_gb": 0.0,
    }
    return EngineConfig(model=directory, tensor_parallel=world, **(defaults | options))


def processes_of(engine: Engine) -> _Processes:
    assert isinstance(engine.runner, LeadRunner)
    return engine.runner._ranks._processes


def pids_of(processes: _Processes) -> list[int]:
    return [process.pid for process in processes._by_rank.values()]


def spec_of(config: EngineConfig, model: ModelConfig | None = None) -> EngineSpec:
    model = model if model is not None else read_model_config(config.model)
    return resolve(config, model, model.vocab_size)
