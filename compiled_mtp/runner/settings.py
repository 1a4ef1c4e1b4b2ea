"""What follows from an engine's configs before it loads anything, and the key of a cache of compiled code."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.cache.kv_cache import resolve_kv_dtype
from compiled_mtp.communicators.communicator import Exchange
from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.artifacts import machine_key, source_digest
from compiled_mtp.graphs.buckets import Bucket, RoundShape
from compiled_mtp.graphs.compile import GraphMode
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.draft_head import DraftHeadPlan
from compiled_mtp.models.shards import with_prompt_rows
from compiled_mtp.models.weight_format import Formats, Recipe, resolve_recipe
from compiled_mtp.models.weights import read_formats
from compiled_mtp.ops.registry import use_reference
from compiled_mtp.runner.draft_choice import plan_draft_head
from compiled_mtp.runner.graph_choice import choose_compiled, has_graphs

logger = logging.getLogger(__name__)

# Of stored weights. Below, waiting for each other at every operator costs threads more than they save: the
# checkpoint that ships, of 22 MB, decodes at 1.6 times the speed with one thread as with two on two idle
# cores, and on busy ones at many times.
_LEAST_THREADED_BYTES = 64 << 20
# What the saved programs of a graph_cache were traced from, beside this file.
_TRACED = (
    *("cache", "communicators", "graphs", "model_config.py", "models", "ops", "rounds"),
    *("runner/program_maker.py", "runner/programs.py", "runner/static_inputs.py"),
    *("step.py", "step_output.py"),
)
# Fields that compiled code does not depend on, or not as they are given: the key holds what became of device,
# dtype, max_model_len, batch_sizes, num_blocks, graph_mode, num_threads, weight_recipe, exchange,
# draft_vocab, draft_head_dtype and prefill_chunk.
_CONFIG_APART = frozenset(
    (
        *("model", "offline", "compile", "graph_cache", "mtp_depths", "seed", "max_in_flight"),
        *("reference_ops", "prefix_cache", "prefix_cache_gb", "check_weights", "offload_gb", "mask_threads"),
        *("exchange", "allow_extra_tensors"),
        *("draft_vocab", "device", "dtype", "max_model_len", "batch_sizes", "num_blocks", "graph_mode"),
        *("num_threads", "weight_recipe", "draft_head_dtype", "prefill_chunk"),
    )
)
_MODEL_APART = ("eos_token_ids", "generation_defaults", "max_position_embeddings", "dtype", "quantized")


@dataclass(frozen=True)
class Settings:
    """What follows from the configs before anything is loaded.

    part: what this rank holds of `model`. has_shapes: what runs has fixed shapes, made ready at the start:
    compiled, captured or both. shapes: of the rounds that will run, the last the deepest. cache: the
    graph_cache that is used. exchange: the way to the other ranks, if any.
    """

    config: EngineConfig
    model: ModelConfig
    part: ModelConfig
    is_compiled: bool
    has_shapes: bool
    shapes: tuple[RoundShape, ...]
    num_valid_ids: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    recipe: Recipe | None
    formats: Formats
    cache: Path | None
    draft_head: DraftHeadPlan
    exchange: Exchange | None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return 1 if self.exchange is None else self.exchange.world

    @property
    def prompt_rows(self) -> bool:
        """Whether a rank also holds some rows of what is cut by columns."""
        return self.exchange is not None and self.exchange.keeps_prompt_rows

    def own_folder(self, folder: Path) -> Path:
        """Where this rank's saved programs are, those of one rank alone being in `folder`."""
        exchange = self.exchange
        if exchange is None:
            return folder
        return folder.with_name(f"{folder.name}_{exchange.rank}_of_{self.world}")

    def agree(self, value: int) -> int:
        """The least `value` of all ranks: what follows from it must be the same on each."""
        return value if self.exchange is None else self.exchange.least(value)

    @property
    def mtp_step(self) -> int:
        """The most drafts of a round."""
        return self.shapes[-1].chain


def resolve(
    config: EngineConfig,
    model_config: ModelConfig,
    num_valid_ids: int,
    exchange: Exchange | None = None,
    *,
    is_checkpoint: bool,
) -> Settings:
    """Settle what the configs leave open. Sets threads and operators of the process.

    is_checkpoint: weights come from the checkpoint's files. Raises ValueError for what does not fit.
    """
    device = resolve_device(config.device)
    is_compiled = choose_compiled(config, device)
    part = model_config
    if exchange is not None:
        if device.type == "cuda":
            device = torch.device("cuda", exchange.rank)
        part = model_config.shard(exchange.rank, exchange.world)
    num_threads = config.num_threads
    if num_threads is None and device.type == "cpu" and is_checkpoint and _is_small(config.model):
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    has_shapes = is_compiled or has_graphs(config, device)
    shapes = tuple(RoundShape(depth, depth) for depth in config.depths)
    use_reference(config.reference_ops)
    if config.reference_ops:
        logger.warning("on their reference: %s", ", ".join(config.reference_ops))
    dtype = getattr(torch, config.resolve_dtype(device.type, model_config))
    recipe = resolve_recipe(config.weight_recipe, has_fp8=model_config.quantized, device=device)
    formats = read_formats(model_config, config.model if is_checkpoint else None, device, recipe)
    if exchange is not None and exchange.keeps_prompt_rows:
        formats = with_prompt_rows(formats)
    cache = None if config.compile == "off" else config.graph_cache
    if cache is not config.graph_cache:
        logger.warning("running uncompiled: with compile=off graph_cache is not used")
    return Settings(
        config=config,
        model=model_config,
        part=part,
        is_compiled=is_compiled,
        has_shapes=has_shapes,
        shapes=shapes,
        num_valid_ids=num_valid_ids,
        device=device,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(config.kv_dtype, dtype, device),
        max_model_len=config.resolve_max_model_len(model_config),
        recipe=recipe,
        formats=formats,
        cache=cache,
        exchange=exchange,
        draft_head=plan_draft_head(config, model_config, num_valid_ids, device, shapes[-1].chain),
    )


def _is_small(path: Path) -> bool:
    """Whether threads cost more than they save."""
    return sum(weight.num_bytes for weight in read_stored(path).values()) < _LEAST_THREADED_BYTES


def early_key(settings: Settings) -> dict[str, Any]:
    """What compiled code depends on, but for `late_key`: what a graph_cache must have been made for.

    A field that is new in a config is part of it until it is named as being apart.
    """
    model = {f"model.{name}": value for name, value in asdict(settings.model).items()}
    for name in _MODEL_APART:
        del model[f"model.{name}"]
    given = settings.config.model_dump(mode="json", exclude=set(_CONFIG_APART))
    is_cpu = settings.device.type == "cpu"
    return {
        **model,
        **machine_key(settings.device),
        **given,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "weight_recipe": settings.recipe,
        "weight_formats": {name: form.name for name, form in sorted(settings.formats.items())},
        "shapes": settings.shapes,
        "draft_ids": settings.draft_head.num_ids,
        "draft_head_is_fp8": settings.draft_head.is_fp8,
        "prefill_chunk": settings.config.resolve_prefill_chunk(settings.device.type, settings.model),
        "exchange": None if settings.exchange is None else settings.exchange.kind,
        "num_valid_ids": settings.num_valid_ids,
        "max_model_len": settings.max_model_len,
        "source": source_digest(Path(__file__).parents[1] / name for name in _TRACED),
        "num_threads": torch.get_num_threads() if is_cpu else 0,
    }


def late_key(
    settings: Settings, buckets: tuple[Bucket, ...], num_blocks: int, graph_mode: GraphMode | None
) -> dict[str, Any]:
    """What follows from the weights: the row unit's shapes, the blocks beside them, the graph mode."""
    sizes = [bucket.groups for bucket in buckets]
    key: dict[str, Any] = {"batch_sizes": sizes, "num_blocks": num_blocks}
    return key | ({"graph_mode": graph_mode} if settings.device.type == "cuda" else {})


def resolve_device(name: str) -> torch.device:
    """The device that `name` stands for. Raises ValueError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be available, got cuda; torch finds no CUDA device, use device=cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
