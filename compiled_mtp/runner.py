"""Owns what lives on the device (models, caches, slot rows, static inputs) and turns a plan into a result."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.batch import SlotState
from compiled_mtp.cache.kv_cache import KV_SCALE_BYTES, KVCache, resolve_kv_dtype
from compiled_mtp.cache.state_cache import StateCache, ring_length
from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.artifacts import (
    PROGRAMS_NAME,
    check_key,
    load,
    machine_key,
    read_key,
    source_digest,
)
from compiled_mtp.graphs.buckets import ladder
from compiled_mtp.graphs.compile import GraphMode
from compiled_mtp.memory import CacheShape, MemoryPlan, available_bytes, plan_memory
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.layers import Linear, rotary_table
from compiled_mtp.models.moe import Router
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.row_unit import find_row_unit
from compiled_mtp.models.weights import kept_fp8, load_weights
from compiled_mtp.ops.registry import use_reference
from compiled_mtp.programs import Programs
from compiled_mtp.request import StepPlan, StepResult
from compiled_mtp.step import Step

logger = logging.getLogger(__name__)

# Of the memory that is free once the weights are loaded; activations take the rest.
_CACHE_SHARE = 0.85
# Of a model whose steps are long enough for "reduce-overhead". Its bookkeeping takes the host 0.2 to 0.65 ms
# a step; the smallest released model, 1.5 GB, loses 0.5 % to it, and one of a few MB half its speed.
_LEAST_TREE_BYTES = 1 << 30
# What the saved programs of a graph_cache were traced from, beside this file.
_TRACED = ("batch.py", "cache", "graphs", "models", "ops", "programs.py", "step.py")

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while the engine starts."""

Fill = Callable[[Mapping[str, torch.Tensor]], None]
"""Writes every parameter, by name."""


@dataclass
class _Launch:
    """A step the device may still be working on. `output` lies in host memory once `ready` has happened."""

    plan: StepPlan
    output: torch.Tensor
    ready: torch.Event | None


class Runner:
    """Runs plans; `run` returns the result of the launch `max_in_flight` plans ago, or None.

    `waited_s` sums the seconds that `run` was blocked on the device. `fill` writes the parameters instead
    of the checkpoint's loader (benchmarks: no weights of that size are at hand). Raises ValueError while it
    is created for a checkpoint that does not fit its config.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        num_valid_ids: int,
        progress: Progress | None = None,
        fill: Fill | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device = _resolve_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        use_reference(config.reference_ops)
        if config.reference_ops:
            logger.warning("on their reference: %s", ", ".join(config.reference_ops))
        self.max_in_flight = config.resolve_max_in_flight(self.device.type)
        self.max_model_len = config.resolve_max_model_len(model_config)
        dtype = getattr(torch, config.resolve_dtype(self.device.type, model_config))
        kv_dtype = resolve_kv_dtype(config.kv_dtype, dtype, self.device)
        self.fp8 = kept_fp8(model_config, config.model if fill is None else None, self.device)
        self._cache = None if config.compile == "off" else config.graph_cache
        if self._cache is not config.graph_cache:
            logger.warning("running uncompiled: with compile=off graph_cache is not used")
        # Whatever can be refused without the weights is refused before they are loaded.
        key = self._early_key(dtype, num_valid_ids)
        if self._cache is not None:
            check_key(self._cache, read_key(self._cache) | key)
        target, draft = self._load(dtype, progress, fill)
        self.unit = self._row_unit(target)
        self.buckets = ladder(self.unit, config.mtp_step, config.max_batch, config.batch_sizes)
        draft_ids = self._draft_ids(num_valid_ids)
        draft_head = 0 if draft_ids is None else len(draft_ids) * model_config.hidden_size * dtype.itemsize
        self.num_blocks = self._plan_memory(dtype, kv_dtype, draft_head).num_blocks
        self.graph_mode = _graph_mode(config, self.device, sum(p.nbytes for p in target.parameters()))
        self.cache_key = key | self._late_key()
        saved = None
        if self._cache is not None:
            check_key(self._cache, self.cache_key)
            directory = load(self._cache) / PROGRAMS_NAME
            # Absent from a cache for CUDA-graph trees, which compile from the other caches.
            saved = directory if directory.is_dir() else None
        slots = config.max_batch + 1
        with torch.no_grad():
            kv_cache = KVCache(
                model_config,
                self.num_blocks,
                config.block_size,
                kv_dtype,
                self.device,
                with_draft=draft is not None,
            )
            self.step = Step(
                target,
                draft,
                kv_cache,
                StateCache(model_config, slots, config.mtp_step, dtype, self.device),
                SlotState(
                    slots,
                    config.mtp_step,
                    -(-self.max_model_len // config.block_size),
                    model_config.hidden_size,
                    model_config.vocab_size,
                    dtype,
                    self.device,
                ),
                rotary_table(model_config, self.max_model_len, self.device),
                config.mtp_step,
                num_valid_ids,
                self.max_model_len,
                config.synthetic_acceptance,
                draft_ids,
            )
        self.programs = Programs(self.step, self.buckets, config.prefill_chunk, self.graph_mode)
        if self.graph_mode is not None:
            report = None if progress is None else partial(progress, "compiled shapes")
            self.programs.warm_up(report, saved)
        self.waited_s = 0.0
        self._launches: deque[_Launch] = deque()
        self._host_buffers: dict[torch.Size, list[tuple[torch.Tensor, torch.Event | None]]] = {}

    def run(self, plan: StepPlan | None) -> StepResult | None:
        """Launch `plan`, if any, and return the oldest result if it is due: more launches than may be in
        flight.

        Without a plan the oldest launch is waited for. Mutates the device's state as the plan says. A launch
        that fails (memory, the device) has its error as its result, at once; what it mutated is not known.
        """
        if plan is not None:
            try:
                self._launches.append(self._launch(plan))
            except AssertionError:  # A bug of ours.
                raise
            except Exception as error:
                return _failed(plan, error)
        is_due = len(self._launches) > self.max_in_flight or plan is None
        return self._finish(self._launches.popleft()) if self._launches and is_due else None

    def drop_launches(self) -> None:
        """Forget every launch, and what an interrupted one may have left half done."""
        self._launches.clear()
        self.programs.forget_batches()

    def close(self) -> None:
        """Wait for the device and drop every launch; their results are lost."""
        self.drop_launches()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:  # Whoever ran a request has been told already.
                logger.error("the device failed", exc_info=error)

    def _launch(self, plan: StepPlan) -> _Launch:
        self.step.slots.install(plan)
        if plan.kind == "decode":
            output = self.programs.decode(plan.slots)
        else:
            output = self.programs.prefill(plan.slots[0], plan.token_ids, plan.start, plan.is_last)
        return self._fetch(plan, output)

    def _fetch(self, plan: StepPlan, output: torch.Tensor) -> _Launch:
        """Start the copy of `output` to a host buffer that no unread launch uses."""
        free = self._host_buffers.setdefault(output.shape, [])
        if free:
            host, ready = free.pop()
        else:
            is_cuda = self.device.type == "cuda"
            host = torch.empty(output.shape, dtype=torch.int64, pin_memory=is_cuda)
            # torch.cuda.Event would ask for the current stream in Python, at every step.
            ready = torch.Event(self.device) if is_cuda else None
        host.copy_(output, non_blocking=True)
        if ready is not None:
            ready.record()
        return _Launch(plan, host, ready)

    def _finish(self, launch: _Launch) -> StepResult:
        if launch.ready is not None:
            begin = time.perf_counter()
            try:
                launch.ready.synchronize()
            except Exception as error:
                return _failed(launch.plan, error)
            self.waited_s += time.perf_counter() - begin
        plan, values = launch.plan, launch.output.tolist()
        self._host_buffers[launch.output.shape].append((launch.output, launch.ready))
        if plan.kind == "prefill":
            return StepResult(plan, [[values[0]] if plan.is_last else []])
        tokens = [row[2 : 2 + row[0]] for row in values[: len(plan.slots)]]
        return StepResult(plan, tokens)

    def _load(
        self, dtype: torch.dtype, progress: Progress | None, fill: Fill | None
    ) -> tuple[TargetModel, DraftModel | None]:
        config = self.model_config
        target = TargetModel(config, dtype, self.device, self.fp8)
        draft = DraftModel(config, dtype, self.device, self.fp8) if self.config.mtp_step else None
        parameters = {name: parameter.data for name, parameter in target.named_parameters()}
        if draft is not None:
            parameters |= {f"mtp.{name}": parameter.data for name, parameter in draft.named_parameters()}
        if fill is not None:
            fill(parameters)
        else:
            report = None if progress is None else partial(progress, "weights")
            load_weights(config, self.config.model, parameters, with_mtp=draft is not None, progress=report)
        return target, draft

    def _row_unit(self, target: TargetModel) -> int:
        if self.device.type == "cuda":
            return 1
        weights = [m.weight for m in target.modules() if isinstance(m, (Linear, Router))]
        widest = {row for unit in (1, 2, 4, 8) for row in self._row_counts(unit)}
        unit = find_row_unit([*weights, target.head_weight], sorted(widest))
        if unit is None:
            logger.warning(
                "this machine's matrix library gives a row other bits with other rows beside it: tokens may "
                "depend on the batch and on mtp_step here"
            )
            return 8
        return unit

    def _row_counts(self, unit: int) -> list[int]:
        config = self.config
        return [b.rows for b in ladder(unit, config.mtp_step, config.max_batch, config.batch_sizes)]

    def _draft_ids(self, num_valid_ids: int) -> torch.Tensor | None:
        """The ids the draft chooses from [n] int64: the lowest, and the eos ids; None for all."""
        count = self.config.draft_vocab
        if count is None or count >= num_valid_ids or not self.config.mtp_step:
            return None
        special = [i for i in sorted(self.model_config.eos_token_ids) if count <= i < num_valid_ids]
        return torch.tensor([*range(count), *special], dtype=torch.int64, device=self.device)

    def _early_key(self, dtype: torch.dtype, num_valid_ids: int) -> dict[str, Any]:
        """What compiled code depends on, but for `_late_key`: what a graph_cache must have been made for."""
        shape = asdict(self.model_config)
        for name in ("eos_token_ids", "generation_defaults", "max_position_embeddings", "dtype", "quantized"):
            del shape[name]
        key = {f"model.{name}": value for name, value in shape.items()}
        key |= machine_key(self.device)
        return key | {
            "dtype": str(dtype).removeprefix("torch."),
            "kv_dtype": self.config.kv_dtype,
            "fp8_weights": len(self.fp8),
            "mtp_step": self.config.mtp_step,
            "draft_vocab": self.config.draft_vocab,
            "num_valid_ids": num_valid_ids,
            "source": source_digest(Path(__file__).parent / name for name in _TRACED),
            "synthetic_acceptance": self.config.synthetic_acceptance,
            "max_batch": self.config.max_batch,
            "max_model_len": self.max_model_len,
            "block_size": self.config.block_size,
            "prefill_chunk": self.config.prefill_chunk,
            "num_threads": torch.get_num_threads() if self.device.type == "cpu" else 0,
        }

    def _late_key(self) -> dict[str, Any]:
        """What follows from the weights: the row unit's shapes, the blocks beside them, the graph mode."""
        sizes = [bucket.groups for bucket in self.buckets]
        key: dict[str, Any] = {"batch_sizes": sizes, "num_blocks": self.num_blocks}
        return key | ({"graph_mode": self.graph_mode} if self.device.type == "cuda" else {})

    def _plan_memory(self, dtype: torch.dtype, kv_dtype: torch.dtype, other_bytes: int) -> MemoryPlan:
        config, model = self.config, self.model_config
        shape = CacheShape(
            num_attention_layers=model.num_attention_layers + (config.mtp_step > 0),
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_bytes=kv_dtype.itemsize,
            num_gdn_layers=model.num_gdn_layers,
            num_key_heads=model.linear_num_key_heads,
            num_value_heads=model.linear_num_value_heads,
            key_head_dim=model.linear_key_head_dim,
            value_head_dim=model.linear_value_head_dim,
            conv_dim=model.linear_conv_dim,
            conv_bytes=dtype.itemsize,
            ring_length=ring_length(config.mtp_step, model.conv_kernel),
            kv_scale_bytes=0 if kv_dtype == dtype else KV_SCALE_BYTES,
        )
        return plan_memory(
            int(_free_bytes(self.device) * _CACHE_SHARE) - other_bytes,
            shape,
            block_size=config.block_size,
            max_batch=config.max_batch,
            max_model_len=self.max_model_len,
            num_blocks=config.num_blocks or self._cached_num_blocks(),
        )

    def _cached_num_blocks(self) -> int | None:
        """The number of blocks that the graph_cache was made for: code is compiled for the caches' shapes."""
        return None if self._cache is None else read_key(self._cache).get("num_blocks")


def _failed(plan: StepPlan, error: Exception) -> StepResult:
    logger.error("a %s step failed", plan.kind, exc_info=error)
    return StepResult(plan, [], f"{type(error).__name__}: {error}")


def _free_bytes(device: torch.device) -> int:
    """Bytes that nobody uses on `device` now, with the weights loaded."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def _graph_mode(config: EngineConfig, device: torch.device, weight_bytes: int) -> GraphMode | None:
    """How the step is compiled, or None: a newcomer's first run on a CPU starts at once, uncompiled.

    "auto" is what a graph_cache was made for; without one torch's CUDA-graph trees, where a step is long
    enough to hide what they do between two of them.
    """
    if config.compile == "off":
        return None
    if config.compile == "auto" and device.type == "cpu" and config.graph_cache is None:
        # Whoever chose a graph mode or shapes to compile wanted compiled code.
        is_wanted = config.graph_mode != "auto" or config.batch_sizes is not None
        logger.log(
            logging.WARNING if is_wanted else logging.INFO,
            "running uncompiled: on a CPU compile=auto takes only what a graph_cache holds: set compile=on",
        )
        return None
    if config.graph_mode != "auto":
        return config.graph_mode
    if device.type == "cpu":
        return "replay"  # there is no graph to replay, and one name for it
    if config.graph_cache is not None:
        stored: GraphMode = read_key(config.graph_cache).get("graph_mode", "replay")
        return stored
    return "reduce-overhead" if weight_bytes >= _LEAST_TREE_BYTES else "replay"


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be available, got cuda; torch finds no CUDA device, use device=cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
