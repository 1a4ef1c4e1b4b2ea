"""EngineConfig: the caller's settings of an engine.

Nothing in this folder imports torch: dtypes are strings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from compiled_mtp.config.environment import ENV_PREFIX, SERVER_ENV_PREFIX, unknown_variables
from compiled_mtp.config.torchrun import Torchrun
from compiled_mtp.config.values import CountOrFile, DepthOrAuto, Depths, Device, Names, Numbers
from compiled_mtp.errors import check, fail, remedy_of, rule_of, shown
from compiled_mtp.graphs.buckets import PREFILL_MULTIPLE
from compiled_mtp.model_config import NOT_TRACED, ModelConfig

# max_batch: its limit, its default, and the largest default on a GPU.
MOST_BATCH, DEFAULT_BATCH, DEFAULT_GPU_BATCH = 256, 8, 256
# The remedy for a checkpoint without an MTP head.
HEAD_REMEDY = "put the base model's mtp.* tensors beside its files as mtp.safetensors"
# Half of the rows at which the partial sums of a wide FP8 weight exceed 4 GiB, and an eighth of the limit of
# a launch grid's second axis.
MOST_PREFILL_CHUNK = 8192
# Images of a request: far above sensible prompts.
_MOST_IMAGES = 256
# Default prefill chunks. Products get faster with more rows: from 512 to 2,048 by a fifth for 4B and a tenth
# for 27B. But requests that decode wait for a chunk (27B: 170 ms instead of 40), so chunks are short while
# there are any. Narrow products need more rows to fill a GPU, and 4,096 rows of half the width of 27B take no
# more memory than its 2,048.
GPU_CHUNK, NARROW_CHUNK, BUSY_CHUNK, CPU_CHUNK = 2048, 4096, 512, 512
NARROW = 2560


class EngineConfig(BaseSettings):
    """How to run a checkpoint; keyword arguments win over COMPILED_MTP_* variables, and both over defaults.

    Frozen after creation. Raises ValueError with one line per mistake: the field, its rule, the value and
    what to give instead; unknown names are mistakes, in keyword arguments and in the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, allow_inf_nan=False
    )

    model: Path = Field(
        default=Path(__file__).parents[1] / "default_model",
        description="a Hugging Face checkpoint directory, or a repository of the Hub such as "
        "Qwen/Qwen3.5-4B; default: the checkpoint that ships",
        json_schema_extra=NOT_TRACED,
    )
    lora: Path | None = Field(
        default=None,
        description="a directory with a LoRA adapter, as PEFT saves it, to merge into the model's weights",
        json_schema_extra=NOT_TRACED,
    )
    chat_template: Path | None = Field(
        default=None,
        description="a Jinja file that replaces the checkpoint's chat template",
        json_schema_extra=NOT_TRACED,
    )
    offline: bool = Field(
        default=False,
        description="never download: a repository must be in the local Hugging Face cache",
        json_schema_extra=NOT_TRACED,
    )
    device: Device = Field(
        default="auto",
        description="auto for the GPU if there is one, else the CPU; cuda for the current GPU, cuda:1 for "
        "another",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto for the checkpoint's dtype on a GPU and float32 on a CPU"
    )
    kv_dtype: Literal["auto", "float8_e4m3fn"] = Field(
        default="auto",
        description="dtype of cached keys and values: auto for that of the activations; float8_e4m3fn "
        "takes half of bfloat16's memory and rounds more",
    )
    weight_recipe: Literal["auto", "w8a8", "w8a16"] = Field(
        default="auto",
        description="how FP8 weights are multiplied: w8a8 with activations quantised in groups of 128, as "
        "such checkpoints are made for, w8a16 with unquantised activations; auto for w8a8, except w8a16 on a "
        "GPU below compute capability 9.0 or with little shared memory (12.0, for example)",
    )
    mtp_step: DepthOrAuto = Field(
        default="auto",
        description="tokens drafted per round, 0 to 7; 0 is plain decode; default: auto, which chooses from "
        "mtp_depths, round by round",
    )
    mtp_depths: Depths = Field(
        default=(0, 1, 2, 3, 5),
        description="with mtp_step=auto, the numbers of drafts to choose from, each 0 to 7, separated by "
        "commas; the largest one sets the size of buffers",
        json_schema_extra=NOT_TRACED,
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        le=MOST_BATCH,
        description=f"the most requests decoded together, 1 to {MOST_BATCH}; default: {DEFAULT_BATCH}, on a "
        f"GPU up to {DEFAULT_GPU_BATCH} if its memory has room for 4,096 tokens of each request",
        json_schema_extra=NOT_TRACED,
    )
    batch_sizes: Numbers = Field(
        default=None,
        description="batch sizes with a compiled shape of their own, separated by commas; default: 1, 2, 4 "
        "and so on up to max_batch, from 32 on also the middle between two",
        json_schema_extra=NOT_TRACED,
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="the most tokens of prompt and output together; default: the checkpoint's limit; "
        "num_blocks may lower it",
    )
    block_size: int = Field(
        default=64, ge=16, multiple_of=16, description="tokens of a KV block, a multiple of 16"
    )
    memory_utilization: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="share of the free memory, after the weights are loaded, that caches take; activations "
        "get the rest",
        json_schema_extra=NOT_TRACED,
    )
    num_blocks: int | None = Field(
        default=None,
        ge=2,
        description="KV blocks; default: as many as fit into free memory",
        json_schema_extra=NOT_TRACED,
    )
    offload_gb: float | None = Field(
        default=None,
        ge=0,
        le=2**20,
        description="GiB of host memory for requests that are offloaded while blocks are short, 0 for none; "
        "others are recomputed; default: a tenth of free memory",
        json_schema_extra=NOT_TRACED,
    )
    tensor_parallel: int = Field(
        default=1,
        description="processes that share the model, 1, 2, 4 or 8; no token depends on it",
    )
    communicator: Literal["auto", "symmetric", "nccl", "gloo"] = Field(
        default="auto",
        description="how ranks exchange partial results: on GPUs symmetric (memory that all may write) or "
        "nccl, on CPUs gloo; no token depends on it",
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=64,
        le=MOST_PREFILL_CHUNK,
        multiple_of=64,
        description="tokens of a prefill chunk, the most of a prompt per launch, a multiple of 64 and of "
        f"block_size, at most {MOST_PREFILL_CHUNK}; no token depends on it; default: {CPU_CHUNK} on a CPU, "
        f"{GPU_CHUNK} on a GPU ({NARROW_CHUNK} for a hidden_size up to {NARROW}), and {BUSY_CHUNK} there "
        "while other requests decode",
    )
    prefix_cache: bool = Field(
        default=True,
        description="resume a prompt near the point where it differs from earlier ones; without it each is "
        "prefilled from its beginning",
        json_schema_extra=NOT_TRACED,
    )
    prefix_cache_gb: float | None = Field(
        default=None,
        gt=0,
        le=2**20,
        description="GiB of device memory for the state snapshots from which prompts resume, and on a GPU at "
        "most as much host memory for evicted ones; default: 4, or an eighth of the caches' memory if that "
        "is less",
        json_schema_extra=NOT_TRACED,
    )
    compile: Literal["auto", "off", "on"] = Field(
        default="auto",
        description="off for no torch.compile: on a GPU it captures graphs of eager code, which starts "
        "fastest; on to require it",
        json_schema_extra=NOT_TRACED,
    )
    graph_mode: Literal["auto", "reduce-overhead", "replay", "off"] = Field(
        default="auto",
        description="how a GPU replays a step: reduce-overhead as torch's CUDA-graph trees, replay as one "
        "graph, off launches each kernel, for debugging; auto: off with reference_ops, the mode of a "
        "graph_cache, else reduce-overhead for models of at least 1 GiB",
        json_schema_extra=NOT_TRACED,
    )
    graph_cache: Path | None = Field(
        default=None, description="a file that `compiled-mtp export` wrote", json_schema_extra=NOT_TRACED
    )
    max_images: int = Field(
        default=0,
        ge=0,
        le=_MOST_IMAGES,
        description="images per request, 0 for none",
        json_schema_extra=NOT_TRACED,
    )
    max_pixels: int = Field(
        default=1280 * 1024,
        ge=1024,
        le=1 << 24,
        description="the most pixels of an image; a larger one is shrunk; 1024 pixels become a token",
        json_schema_extra=NOT_TRACED,
    )
    draft_vocab: CountOrFile = Field(
        default=None,
        description="draft only from this many lowest ids, or from the ids in a file (one per line, or a "
        "JSON list: `compiled-mtp rank-vocabulary`), and the eos ids; default: all",
        json_schema_extra=NOT_TRACED,
    )
    lookup: Literal["auto", "off"] = Field(
        default="auto",
        description="auto to draft also from the request's own text, what followed its last tokens where "
        "they occurred before, for edits, quotes and agents; up to 15 drafts where memory has room for their "
        "rings; off for the MTP head's drafts alone; no token depends on it",
        json_schema_extra=NOT_TRACED,
    )
    draft_dtype: Literal["auto", "weights", "float8_e4m3fn", "int4"] = Field(
        default="auto",
        description="dtype of weights that only drafts read (the MTP layer's linears, a copy of the head's "
        "rows): weights as stored, float8_e4m3fn in blocks of 128, int4 for a head in groups of 128 and the "
        "rest in FP8, auto for what suits a bfloat16 model and the GPU; no token depends on it",
        json_schema_extra=NOT_TRACED,
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="seed for requests that have none, 0 to 2**63 - 1: the first of them gets it, the seeds "
        "of the others follow from it and their number; default: from the operating system",
        json_schema_extra=NOT_TRACED,
    )
    scoring: bool = Field(
        default=False,
        description="give every slot room for the ids of a given output, as `Engine.score` needs",
    )
    routed_experts: bool = Field(
        default=False,
        description="True to record the experts of every token, for requests with return_routed_experts",
    )
    synthetic_acceptance: float | None = Field(
        default=None, ge=0.0, le=1.0, description="benchmarks only: accept drafts at this rate, 0 to 1"
    )
    check_weights: bool = Field(
        default=False,
        description="look for NaN and infinity in every weight at load; always done on a GPU",
        json_schema_extra=NOT_TRACED,
    )
    allow_extra_tensors: bool = Field(
        default=False,
        description="skip tensors of the checkpoint that the model does not use, with a warning that names "
        "them; without it they are an error",
        json_schema_extra=NOT_TRACED,
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=0,
        le=1,
        description="steps launched before the last result is read, 0 or 1; default: 0 on a CPU, 1 on a GPU",
        json_schema_extra=NOT_TRACED,
    )
    reference_ops: Names = Field(
        default=(),
        description="operators that run their reference, separated by commas",
        json_schema_extra=NOT_TRACED,
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of torch, at most the machine's cores; default: 1 for less than 64 MiB of "
        "weights, else torch's own",
    )
    mask_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads that make the masks of grammars; default: half of the cores, at most 8",
        json_schema_extra=NOT_TRACED,
    )

    def __init__(self, **values: Any) -> None:
        known = sorted(type(self).model_fields)
        unknown = [
            name
            for name in unknown_variables(ENV_PREFIX, known)
            if not name.upper().startswith(SERVER_ENV_PREFIX)
        ]
        remedy = f"known are {ENV_PREFIX} and one of {known}"
        check(not unknown, "environment", "name settings only", unknown, remedy)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError("\n".join(_explain(e) for e in error.errors())) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_bools(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic, like Python, takes True as the number 1.
        entries = value if isinstance(value, list | tuple) else (value,)
        name = str(info.field_name)
        if cls.model_fields[name].annotation is not bool and any(isinstance(one, bool) for one in entries):
            raise fail(name, "not be a bool", value, "give its value")
        return value

    @field_validator("mtp_depths")
    @classmethod
    def _some_depth(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        check(bool(value), "mtp_depths", "name a depth", value, "give numbers from 0 to 7")
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _keep_relative(cls, value: Any) -> Any:
        # Path drops the "./" that marks a directory rather than a repository of the Hub.
        return Path(value).absolute() if isinstance(value, str) and value.startswith("./") else value

    @field_validator("model", "lora", "chat_template", "graph_cache", "draft_vocab")
    @classmethod
    def _expand_home(cls, value: Path | int | None, info: ValidationInfo) -> Path | int | None:
        try:
            # No shell expands "~" in the environment or in --flag=~/file.
            return value.expanduser() if isinstance(value, Path) else value
        except RuntimeError as error:
            raise fail(str(info.field_name), "be a path", value, f"{error}; write it out") from None

    @field_validator("tensor_parallel")
    @classmethod
    def _ranks_are_even(cls, value: int) -> int:
        check(
            value in (1, 2, 4, 8), "tensor_parallel", "be 1, 2, 4 or 8", value, "use another number of ranks"
        )
        return value

    @field_validator("num_threads")
    @classmethod
    def _threads_fit(cls, value: int | None) -> int | None:
        cores = os.cpu_count() or 1
        rule = f"be at most {cores}, the cores of this machine"
        check(value is None or value <= cores, "num_threads", rule, value, "lower it")
        return value

    @model_validator(mode="after")
    def _batches_fit(self) -> EngineConfig:
        most = self.max_batch or MOST_BATCH
        if any(not 1 <= batch <= most for batch in self.batch_sizes or ()):
            raise fail(
                "batch_sizes",
                f"lie in 1..{most} (max_batch)",
                list(self.batch_sizes or ()),
                "raise max_batch or drop the others",
            )
        return self

    @model_validator(mode="after")
    def _chunk_fits_blocks(self) -> EngineConfig:
        rule = f"be a multiple of block_size ({self.block_size})"
        fits = (self.prefill_chunk or 0) % self.block_size == 0
        check(fits, "prefill_chunk", rule, self.prefill_chunk, "change one of the two")
        step = self.resume_step
        rule = f"divide a multiple of {PREFILL_MULTIPLE} that is at most {MOST_PREFILL_CHUNK}"
        check(step <= MOST_PREFILL_CHUNK, "block_size", rule, self.block_size, "give a power of two")
        return self

    @model_validator(mode="after")
    def _ranks_are_known(self) -> EngineConfig:
        if self.tensor_parallel > 1:
            Torchrun().check_ranks(self.tensor_parallel)
        return self

    @property
    def vision_pixels(self) -> int:
        """The most pixels of an image, 0 for an engine without images."""
        return self.max_pixels if self.max_images else 0

    @property
    def resume_step(self) -> int:
        """The tokens at whose multiples a prompt may resume: whole blocks, and whole chunks of GDN layers."""
        return math.lcm(PREFILL_MULTIPLE, self.block_size)

    @property
    def depths(self) -> tuple[int, ...]:
        """The numbers of drafts that rounds may have, ascending: several only for mtp_step "auto"."""
        return (self.mtp_step,) if self.mtp_step != "auto" else tuple(sorted({*self.mtp_depths}))

    def settle(self, model: ModelConfig, path: Path) -> EngineConfig:
        """Return this config for the checkpoint `model` in `path`; "auto" becomes 0 without an MTP head.

        Raises ValueError for another mtp_step above 0 without an MTP head.
        """
        if model.mtp_num_layers or not self.depths[-1]:
            return self.model_copy(update={"model": path})
        rule = "be 0 for a checkpoint without mtp.* tensors"
        remedy = f"{path} has none, pass mtp_step=0 for plain decoding or {HEAD_REMEDY}"
        check(self.mtp_step == "auto", "mtp_step", rule, self.mtp_step, remedy)
        return self.model_copy(update={"model": path, "mtp_step": 0})


def as_config(given: EngineConfig | str | Path | None, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the given config, or the config of a model (None: the one that ships) with `settings`.

    Raises ValueError as `EngineConfig` does, for settings beside a config, and for two models.
    """
    if isinstance(given, EngineConfig):
        name, remedy = next(iter(settings), ""), "write EngineConfig(...) with it"
        check(not settings, name, "be a field of the EngineConfig", "it beside one", remedy)
        return given
    if given is None:
        return EngineConfig(**settings)
    got = f"{given} and {settings.get('model')}"
    check("model" not in settings, "model", "be given once", got, "leave one out")
    return EngineConfig(**settings, model=given)


def _explain(error: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors in our form."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    name = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "extra_forbidden":
        remedy = f"known are {sorted(EngineConfig.model_fields)}"
        return str(fail("config", "name settings only", name, remedy))
    return str(fail(name, rule_of(error["msg"]), shown(error["input"], repr), remedy_of(error["type"])))
