"""What the scenarios share: flags, the engine that they name, prompts of random ids, turns and the clock."""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from released_shapes import LAYERS, fill_random, model_config
from synthetic_tokenizer import write_tokenizer

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.model_config import ModelConfig

T = TypeVar("T")
AnyEngine = TypeVar("AnyEngine", bound=Engine)


def count(text: str) -> int:
    """A flag's integer from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on, got {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    """A flag's integers, separated by commas."""
    return [int(number) for number in text.split(",")]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `settings` and `open_engine` read."""
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument(
        "--shape",
        choices=["tiny", *sorted(LAYERS)],
        help="random weights of that shape",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", choices=("auto", "off", "on"), default="auto")
    parser.add_argument(
        "--graph-mode",
        default="auto",
        help="on a GPU: replay, reduce-overhead, auto, or uncompiled, which starts in seconds",
    )
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--num-threads", type=int)


def add_clock_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that `clock` reads."""
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's time, on a CPU that others use too"
    )


def clock(flags: argparse.Namespace) -> Callable[[], float]:
    """Seconds, of the wall or of this process's cores."""
    return time.process_time if flags.cpu_time else time.perf_counter


def shape_config(name: str) -> ModelConfig:
    """A released shape, or "tiny" for tests."""
    if name != "tiny":
        return model_config(name)
    return dataclasses.replace(
        model_config("0.8b"),
        num_layers=4,
        is_full_attention=(False, False, False, True),
        hidden_size=64,
        intermediate_size=64,
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
    """The same random weights in every engine."""
    torch.manual_seed(0)
    fill_random(parameters)


def settings(flags: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that the flags give."""
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
    **given: Any,
) -> AnyEngine:
    """The engine of a checkpoint, or of a shape, where `given` is in the place of what the flags say.

    An engine of a shape takes texts if there is a `folder` for a tokenizer of its vocabulary's size.
    """
    config = EngineConfig(**(settings(flags) | given))
    if flags.shape is None:
        return kind(config, frontend=open_frontend(config))
    model, tokenizer = shape_config(flags.shape), None
    if folder is not None:
        write_tokenizer(folder, model.vocab_size)
        tokenizer = Tokenizer(folder)
    frontend = RequestProcessor(folder or flags.model, model, tokenizer, config.resolve_max_model_len(model))
    return kind(config, frontend=frontend, fill=fill_same)


def draw_prompts(rng: random.Random, prompts: int, length: int, vocab_size: int) -> list[list[int]]:
    """So many prompts of random ids."""
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(prompts)]


def in_turn(ways: Sequence[T], turn: int) -> list[T]:
    """The ways in the order of a turn: no way always comes first."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


def device_name(engine: Engine) -> str:
    """The GPU's name, or cpu."""
    device = engine.runner.spec.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
