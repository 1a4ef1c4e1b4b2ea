"""Shared by the scenarios: flags, the engine that they describe, random prompts, turns and the clock."""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from synthetic_tokenizer import write_tokenizer

from compiled_mtp.benchmarks.released_shapes import LAYERS, fill_random, model_config
from compiled_mtp.config import EngineConfig
from compiled_mtp.config.defaults import resolve_max_model_len
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.runner.assemble import Progress

T = TypeVar("T")
AnyEngine = TypeVar("AnyEngine", bound=Engine)


def numbers(text: str) -> list[int]:
    """Parse a flag's integers, separated by commas."""
    return [int(number) for number in text.split(",")]


def depth(text: str) -> int | str:
    """Parse a flag's number of drafts, or auto."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer or auto, got {text!r}")
    return int(text)


def add_engine_flags(parser: argparse.ArgumentParser, *, may_be_auto: bool = False) -> None:
    """Add the flags that `settings` and `open_engine` read; may_be_auto: --mtp-step takes auto too."""
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument(
        "--shape",
        choices=["tiny", "tiny-moe", *sorted(LAYERS)],
        help="random weights of that shape",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("auto", "off", "on"), default="auto")
    parser.add_argument(
        "--graph-mode",
        default="auto",
        help="on a GPU: replay, reduce-overhead, auto, or uncompiled, which starts in seconds",
    )
    parser.add_argument("--fp8", action="store_true", help="with --shape: FP8 weights, as a release has")
    parser.add_argument("--mtp-step", type=depth if may_be_auto else int, default=3)
    parser.add_argument("--num-threads", type=int)


def add_clock_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `clock` reads."""
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's CPU time, on a machine with other load"
    )


def clock(flags: argparse.Namespace) -> Callable[[], float]:
    """Return the clock in seconds: the wall's, or with --cpu-time this process's CPU time."""
    return time.process_time if flags.cpu_time else time.perf_counter


def shape_config(name: str, *, is_fp8: bool = False) -> ModelConfig:
    """Return the config of a released shape, or of "tiny" or "tiny-moe" for tests."""
    if not name.startswith("tiny"):
        return model_config(name, is_fp8)
    is_moe = name == "tiny-moe"
    return dataclasses.replace(
        model_config("35b-a3b" if is_moe else "0.8b"),
        num_layers=4,
        is_full_attention=(False, False, False, True),
        hidden_size=64,
        intermediate_size=0 if is_moe else 64,
        num_experts=8 if is_moe else 0,
        num_experts_per_tok=2 if is_moe else 0,
        moe_intermediate_size=64 if is_moe else 0,
        shared_expert_intermediate_size=64 if is_moe else 0,
        vocab_size=2048,
        head_dim=64,
        rotary_dim=16,
        num_q_heads=2,
        num_kv_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )


def fill_same(parameters: Mapping[str, torch.Tensor]) -> None:
    """Fill every engine with the same random weights."""
    torch.manual_seed(0)
    fill_random(parameters)


def settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of EngineConfig that the flags set."""
    given = {"model": flags.model, "device": flags.device, "mtp_step": flags.mtp_step}
    given |= {"num_threads": flags.num_threads}
    if flags.graph_mode == "uncompiled":
        return given | {"compile": "off"}
    return given | {"compile": flags.compile, "graph_mode": flags.graph_mode}


def open_engine(
    flags: argparse.Namespace,
    *,
    kind: Callable[..., AnyEngine],
    folder: Path | None = None,
    progress: Progress | None = None,
    **given: Any,
) -> AnyEngine:
    """Return the engine of a checkpoint or of a shape; `given` replaces fields that the flags set.

    An engine of a shape takes texts only with a `folder`, which gets a tokenizer of its vocabulary's size.
    """
    config = EngineConfig(**(settings(flags) | given))
    if flags.shape is None:
        return kind(config, progress=progress, frontend=open_frontend(config))
    model, tokenizer = shape_config(flags.shape, is_fp8=flags.fp8), None
    if folder is not None:
        write_tokenizer(folder, model.vocab_size)
        tokenizer = Tokenizer(folder)
    frontend = RequestProcessor(folder or flags.model, model, tokenizer, resolve_max_model_len(config, model))
    return kind(config, progress=progress, frontend=frontend, fill=fill_same)


def draw_prompts(rng: random.Random, prompts: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return `prompts` prompts of `length` random ids each."""
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(prompts)]


def in_turn(ways: Sequence[T], turn: int) -> list[T]:
    """Return the ways in the order of a turn; each turn begins with another way."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def device_name(engine: Engine) -> str:
    """Return the GPU's name, or cpu."""
    device = engine.runner.spec.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
