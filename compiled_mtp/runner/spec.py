"""EngineSpec: every value that follows from the configs and the device before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from compiled_mtp.cache.kv_cache import resolve_kv_dtype
from compiled_mtp.cache.slot_tensors import SlotRow
from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.config import EngineConfig, defaults
from compiled_mtp.errors import check
from compiled_mtp.graphs.artifacts import read_key
from compiled_mtp.graphs.buckets import RoundShape, prefill_lengths
from compiled_mtp.graphs.compile import GraphMode
from compiled_mtp.model_config import NOT_TRACED, ModelConfig
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.draft_vocabulary import choose_draft_ids
from compiled_mtp.models.draft_weights import DraftPlan, plan_drafts
from compiled_mtp.models.shards import with_prompt_rows
from compiled_mtp.models.weight_format import Formats, Recipe, resolve_recipe
from compiled_mtp.models.weights import read_formats
from compiled_mtp.ops.device import is_assumed
from compiled_mtp.ops.registry import use_reference
from compiled_mtp.ops.window import MAX_DRAFTS
from compiled_mtp.rounds.drafters import CHAIN, LOOKUP, choose_drafters
from compiled_mtp.scheduler.limits import TowerCost
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.step import Drafter, SlotSizes
from compiled_mtp.vision.sizes import PART_PATCHES

logger = logging.getLogger(__name__)

# Stored weights of fewer bytes run on one thread: threads that wait for each other at every operator lose
# more time than they save. The checkpoint that ships, of 22 MB, decodes 1.6 times as fast with one thread as
# with two on two idle cores, and many times as fast on busy ones.
_LEAST_THREADED_BYTES = 64 << 20
# The fewest bytes of a model whose steps are long enough for "reduce-overhead". Its bookkeeping takes the
# host 0.2 to 0.65 ms per step: the smallest released model, of 1.5 GB, loses 0.5 % of its speed, and a model
# of a few MB loses half.
_LEAST_TREE_BYTES = 1 << 30
# The most requests of a round that verifies all looked-up drafts: their rows fill one row tile.
WIDE_REQUESTS = 1
# The numbers of drafts of rounds whose tokens are given. More rows than these in a round save no time.
_GIVEN_DRAFTS, _MOST_GIVEN_ROWS = (3, 7, MAX_DRAFTS), 256


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _draft_weights(plan: DraftPlan) -> Mapping[str, int | str | None]:
    names = ("num_ids", "head", "has_fp8_linears")
    return {name: getattr(plan, name) for name in names}


@dataclass(frozen=True)
class EngineSpec:
    """The resolved values that every part of an engine reads instead of its configs; see `resolve`.

    model_shard: this rank's share of `model`. shapes: the shapes of rounds of any number of requests, the
    deepest last. wide_shapes: the shapes of rounds of up to WIDE_REQUESTS requests that verify more drafts
    than a chain has, all from the text; `narrow` keeps the shapes that memory has room for. given_shapes: the
    shapes of rounds whose tokens are all given, the narrowest first; they have no chain, and there are none
    without `scoring`. drafters: asked in this order. num_valid_ids: ids that the tokenizer knows. cache: the
    graph_cache in use. num_threads: None for torch's number. max_model_len: before memory bounds it.
    prefill_chunk: the most tokens of a prompt in a launch; busy_chunk: the same while rounds wait.
    least_saved: the tokens that a state snapshot near a prompt's end must save when the same prompt comes
    again. communicator: connects this rank to the others, if any.

    A field is part of a graph cache's key unless it is marked NOT_TRACED; `traced` in its metadata makes its
    JSON value, and `setting` names the setting that it resolves, where the names differ.
    """

    config: EngineConfig = field(metadata=NOT_TRACED)
    model: ModelConfig = field(metadata=NOT_TRACED)
    model_shard: ModelConfig = field(metadata=NOT_TRACED)
    device: torch.device = field(metadata=NOT_TRACED)
    dtype: torch.dtype = field(metadata={"traced": _dtype_name})
    kv_dtype: torch.dtype = field(metadata={"traced": _dtype_name})
    weight_recipe: Recipe | None
    weight_formats: Formats = field(
        metadata={"traced": lambda formats: {name: form.name for name, form in sorted(formats.items())}}
    )
    shapes: tuple[RoundShape, ...]
    wide_shapes: tuple[RoundShape, ...] = field(metadata=NOT_TRACED)
    given_shapes: tuple[RoundShape, ...]
    drafters: tuple[Drafter, ...] = field(
        metadata={"traced": lambda drafters: [drafter.name for drafter in drafters], "setting": "lookup"}
    )
    drafts: DraftPlan = field(metadata={"traced": _draft_weights})
    num_valid_ids: int
    max_model_len: int
    prefill_chunk: int
    busy_chunk: int = field(metadata=NOT_TRACED)
    least_saved: int = field(metadata=NOT_TRACED)
    max_in_flight: int = field(metadata=NOT_TRACED)
    num_threads: int | None = field(metadata=NOT_TRACED)
    is_compiled: bool = field(metadata=NOT_TRACED)
    has_graphs: bool = field(metadata=NOT_TRACED)
    cache: Path | None = field(metadata=NOT_TRACED)
    communicator: Communicator | None = field(
        default=None, metadata={"traced": lambda communicator: communicator and communicator.kind}
    )

    @property
    def has_shapes(self) -> bool:
        """Whether programs have fixed shapes, prepared at the start: compiled, captured or both."""
        return self.is_compiled or self.has_graphs

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """The rows of programs for prompts, ascending; () if they have no fixed shapes."""
        if not self.has_shapes:
            return ()
        # A captured length takes no time to compile.
        return prefill_lengths(self.prefill_chunk, has_middles=self.has_graphs)

    @property
    def has_lookup(self) -> bool:
        """Whether drafts are looked up in the text too."""
        return LOOKUP in self.drafters

    def draft_rows(self, max_model_len: int) -> tuple[SlotRow, ...]:
        """What the drafters keep of each request of at most `max_model_len` tokens."""
        sizes = SlotSizes(self.mtp_step, max_model_len, self.model.hidden_size, self.dtype)
        return tuple(row for drafter in self.drafters for row in drafter.rows(sizes))

    @property
    def mtp_step(self) -> int:
        """The most drafts of a chain."""
        return self.shapes[-1].chain

    @property
    def max_drafts(self) -> int:
        """The most drafts that a round verifies."""
        return max(shape.verify for shape in (*self.shapes, *self.wide_shapes, *self.given_shapes))

    @property
    def wide_drafts(self) -> int:
        """The drafts that a round of a wide shape verifies; 0 without wide shapes."""
        return self.wide_shapes[0].verify if self.wide_shapes else 0

    @property
    def wide_requests(self) -> int:
        """The most requests of a round of a wide shape."""
        return WIDE_REQUESTS if self.wide_shapes else 0

    def most_rows(self, max_batch: int) -> int:
        """The most rows of a round of at most `max_batch` requests, without padding."""
        drawn = max(max_batch * (self.mtp_step + 1), self.wide_requests * (self.wide_drafts + 1))
        given = (self.given_requests(shape, max_batch) * (shape.verify + 1) for shape in self.given_shapes)
        return max(drawn, *given, 0)

    def given_requests(self, shape: RoundShape, max_batch: int) -> int:
        """The most requests of a round of one of given_shapes: the narrowest takes all, wider ones as many as
        fill _MOST_GIVEN_ROWS."""
        if shape == self.given_shapes[0]:
            return max_batch
        return min(max_batch, _MOST_GIVEN_ROWS // (shape.verify + 1))

    @property
    def further_depths(self) -> tuple[int, ...]:
        """The depths that a start does not compile; 0 first, at which no text is slower than plain decode."""
        depths = self.config.depths
        if self.config.mtp_step != "auto" or not self.is_compiled:
            return ()
        return tuple(depth for depth in depths if depth != first_depth(depths))

    @property
    def tower(self) -> TowerCost | None:
        """What a slice of the vision tower may cost: as much as a prompt chunk while rounds wait."""
        vision = self.model.vision
        if vision is None:
            return None
        size = vision.hidden_size
        return TowerCost(
            depth=vision.depth,
            patches=vision.merge_size**2,
            part_patches=PART_PATCHES,
            per_patch=4 * size**2 + 2 * size * vision.intermediate_size,
            # Scores and sums; attention runs at about half the speed of products.
            per_pair=2 * 2 * size,
            most=self.busy_chunk * self.model_shard.active_weights,
        )

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return 1 if self.communicator is None else self.communicator.world

    @property
    def prompt_rows(self) -> bool:
        """Whether a rank also holds some rows of the weights that ranks divide by columns."""
        return self.communicator is not None and self.communicator.keeps_prompt_rows

    def own_folder(self, folder: Path) -> Path:
        """The folder of this rank's saved programs; `folder` itself where there is one rank."""
        if self.communicator is None:
            return folder
        return folder.with_name(f"{folder.name}_{self.rank}_of_{self.world}")

    def agree(self, value: int) -> int:
        """The least `value` of all ranks, so that every rank derives the same numbers from it."""
        return value if self.communicator is None else self.communicator.least(value)

    def narrow(self, drafts: int) -> EngineSpec:
        """The spec whose wide rounds verify `drafts` drafts; it has none if a chain has as many."""
        wide = [RoundShape(drafts, shape.chain) for shape in self.wide_shapes if drafts > self.mtp_step]
        return replace(self, wide_shapes=tuple(wide))

    def of_rank(self, communicator: Communicator) -> EngineSpec:
        """From the whole engine's spec, the spec of the rank that `communicator` belongs to."""
        is_cuda, formats = self.device.type == "cuda", self.weight_formats
        return replace(
            self,
            communicator=communicator,
            device=torch.device("cuda", communicator.rank) if is_cuda else self.device,
            model_shard=self.model.shard(communicator.rank, communicator.world),
            weight_formats=with_prompt_rows(formats) if communicator.keeps_prompt_rows else formats,
        )


def resolve(
    config: EngineConfig, model: ModelConfig, num_valid_ids: int, *, is_checkpoint: bool = True
) -> EngineSpec:
    """Resolve what the configs leave open, for an engine of one process; `of_rank` derives a rank's spec.

    is_checkpoint: weights come from the checkpoint's files, whose headers are read. Changes nothing in the
    process; `apply` does. Raises ValueError for settings that do not fit the model or the device.
    """
    rule, remedy = "be left out for weights that come from no file", "leave it out"
    check(is_checkpoint or config.lora is None, "lora", rule, config.lora, remedy)
    device = resolve_device(config.device)
    kind, path = device.type, config.model if is_checkpoint else None
    rule, remedy = "be False for a model without experts", "leave it out"
    check(model.is_moe or not config.routed_experts, "routed_experts", rule, True, remedy)
    dtype = getattr(torch, defaults.resolve_dtype(config, kind, model))
    recipe = resolve_recipe(config.weight_recipe, has_fp8=model.quantized, device=device)
    drafters = choose_drafters(max(config.depths), config.lookup)
    num_threads = config.num_threads
    if num_threads is None and kind == "cpu" and path is not None and _is_small(path):
        num_threads = 1
    formats = read_formats(model, path, device, recipe, dtype, config.tensor_parallel)
    return EngineSpec(
        config=config,
        model=model,
        model_shard=model,
        device=device,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(config.kv_dtype, dtype, device),
        weight_recipe=recipe,
        weight_formats=formats,
        shapes=CHAIN.shapes(config.depths),
        wide_shapes=LOOKUP.shapes(config.depths) if LOOKUP in drafters else (),
        given_shapes=tuple(RoundShape(drafts, 0) for drafts in _GIVEN_DRAFTS) if config.scoring else (),
        drafters=drafters,
        drafts=_plan_drafts(config, model, num_valid_ids, formats, dtype=dtype, device=device),
        num_valid_ids=num_valid_ids,
        max_model_len=defaults.resolve_max_model_len(config, model),
        prefill_chunk=defaults.resolve_prefill_chunk(config, kind, model),
        busy_chunk=defaults.resolve_busy_chunk(config, kind, model),
        least_saved=defaults.resolve_least_saved(kind),
        max_in_flight=defaults.resolve_max_in_flight(config, kind),
        num_threads=num_threads,
        is_compiled=_chooses_compiled(config, kind),
        has_graphs=_has_graphs(config, kind),
        cache=None if config.compile == "off" else config.graph_cache,
    )


def apply(spec: EngineSpec) -> None:
    """Set threads and operators of the process, and log settings whose effect the caller may not expect."""
    config = spec.config
    if not spec.is_compiled and config.compile == "auto":
        # A caller who chose a graph mode or batch sizes expects compiled code.
        is_wanted = config.graph_mode not in ("auto", "off") or config.batch_sizes is not None
        logger.log(
            logging.WARNING if is_wanted else logging.INFO,
            "running uncompiled: on a CPU compile=auto compiles nothing; give a graph_cache, or set "
            "compile=on",
        )
    if spec.device.type == "cuda":
        torch.cuda.set_device(spec.device)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    use_reference(config.reference_ops)
    if config.reference_ops:
        logger.warning("operators on their reference: %s", ", ".join(config.reference_ops))
    if spec.cache is not config.graph_cache:
        logger.warning("running uncompiled: compile=off ignores graph_cache")


def choose_graph_mode(spec: EngineSpec, weight_bytes: int) -> GraphMode | None:
    """How steps become CUDA graphs; None without graphs.

    "auto" is the mode that a graph_cache was made for. Without a cache it is "reduce-overhead" (torch's
    CUDA-graph trees) for models of at least _LEAST_TREE_BYTES, whose steps hide the trees' work on the host.
    Uncompiled code is always captured by hand, "replay". So is the code of several ranks: trees decide on
    each rank by themselves what they capture.
    """
    mode = spec.config.graph_mode
    if not spec.has_graphs:
        return None
    if not spec.is_compiled or spec.communicator is not None:
        return "replay"
    if mode != "auto":
        assert mode != "off"
        return mode
    if spec.cache is not None:
        stored: GraphMode | None = read_key(spec.cache).get("graph_mode", "replay")
        return stored
    return "reduce-overhead" if weight_bytes >= _LEAST_TREE_BYTES else "replay"


def resolve_device(name: str) -> torch.device:
    """The device that `name` stands for. Raises ValueError for a CUDA device that torch does not find."""
    if name == "auto":
        name = "cuda" if is_assumed() or torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if is_assumed():
        return torch.device("cuda", 0)
    if not torch.cuda.is_available():
        raise ValueError(f"device must be available, got {name}; torch finds no CUDA device, use device=cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    check(index < count, "device", f"be one of the {count} GPUs that torch finds", name, "choose another")
    return torch.device("cuda", index)


def _chooses_compiled(config: EngineConfig, device_type: str) -> bool:
    """Whether steps are compiled. By default a CPU runs uncompiled, so that a first run starts at once."""
    if config.compile != "auto":
        return config.compile == "on"
    return device_type != "cpu" or config.graph_cache is not None


def _has_graphs(config: EngineConfig, device_type: str) -> bool:
    """Whether steps become CUDA graphs, compiled or not.

    With reference_ops "auto" means no graphs: a reference may read values on the host, which a graph cannot.
    """
    if config.graph_mode == "auto" and config.reference_ops:
        return False
    return device_type != "cpu" and config.graph_mode != "off"


def _plan_drafts(
    config: EngineConfig,
    model: ModelConfig,
    num_valid_ids: int,
    formats: Formats,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftPlan:
    """What drafts read. Raises ValueError as `choose_draft_ids` and `plan_drafts`, with drafts or without."""
    ids = choose_draft_ids(config.draft_vocab, num_valid_ids, model.eos_token_ids)
    world = config.tensor_parallel
    plan = plan_drafts(config.draft_dtype, model, ids, formats, dtype=dtype, device=device, world=world)
    return plan if config.depths[-1] else DraftPlan()


def _is_small(path: Path) -> bool:
    """Whether the stored weights are so small that one thread is fastest."""
    return sum(weight.num_bytes for weight in read_stored(path).values()) < _LEAST_THREADED_BYTES
