"""ModelConfig: a checkpoint's architecture as plain numbers and names. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from compiled_mtp.errors import check

NOT_TRACED: dict[str, Any] = {"traced": None}
"""Metadata of a field, here and in other records, whose given value compiled code does not depend on. Fields
without it are part of a graph cache's key."""

MOST_ASPECT = 200
"""The longer side of an image over its shorter one, at most."""

GENERATION_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Sampling parameters that a checkpoint's generation_config.json may set, under the same names."""

# Sizes that are divided among ranks; and counts of heads of which several ranks may hold the same one. See
# ModelConfig.shard.
_DIVIDED = (
    "num_q_heads",
    "linear_num_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_REPLICATED = ("num_kv_heads", "linear_num_key_heads")


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower of a checkpoint, and how its images become patches and positions.

    side: rows and columns of the table of position embeddings. An image is resized to multiples of `cell`
    pixels, least_pixels to most_pixels in all, and cut into patches of patch_size; merge_size by merge_size
    patches become one token. mean, std: of a channel, in 0 to 1. mrope_section: how many rotary frequencies
    take their position from the time, the row and the column of a token.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    side: int
    image_token_id: int
    video_token_id: int
    mrope_section: tuple[int, int, int]
    least_pixels: int
    most_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def cell(self) -> int:
        """Pixels along each side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels, times, rows and columns."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def most_tokens(self) -> int:
        """The most tokens of an image. A long and narrow one may exceed most_pixels, by the one row of cells
        that it has at least, and a small one is rounded up to whole cells."""
        row = math.isqrt(MOST_ASPECT * self.most_pixels) // self.cell + 1
        sides = math.isqrt(MOST_ASPECT * self.least_pixels) + math.isqrt(self.least_pixels) + 2
        small = self.least_pixels + self.cell * (sides + self.cell)
        return max(self.most_pixels // self.cell**2, row, small // self.cell**2)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for longer texts; models/rotary.py computes them.

    kind: 'linear' divides every frequency by `factor`. 'yarn' divides those that turn at most `beta_slow`
    times within `original_length` tokens, keeps those that turn more than `beta_fast` times, and blends
    between. truncate: the blend begins and ends at whole indices. attention_factor: multiplies cosines and
    sines.
    """

    kind: Literal["linear", "yarn"]
    factor: float
    original_length: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a checkpoint: the text path of a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model, and its
    MTP head.

    Sizes are numbers of rows, heads or features; dtypes are names ('bfloat16'). A size of a part that the
    family lacks (experts in a dense model) is 0. `family` is a name in models/family.py. `world` is the
    number of ranks that share the model; above 1 the sizes are one rank's, see `shard`.
    four_bit_group: columns per scale of four-bit weights that no checkpoint fills; 0 for weights of another
    kind. scaled_codes: the kind of weights in scaled codes that no checkpoint fills, or Q4_K_M, a mixture.
    max_position_embeddings: the most tokens of a text, with rope scaling.
    """

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    is_full_attention: tuple[bool, ...]
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    tie_word_embeddings: bool
    mtp_num_layers: int
    gate_activation: Literal["silu", "sigmoid"]
    dtype: str = field(metadata=NOT_TRACED)
    max_position_embeddings: int = field(metadata=NOT_TRACED)
    eos_token_ids: tuple[int, ...] = field(metadata=NOT_TRACED)
    quantized: bool = field(metadata=NOT_TRACED)
    generation_defaults: dict[str, float] = field(default_factory=dict, hash=False, metadata=NOT_TRACED)
    four_bit_group: int = field(default=0, metadata=NOT_TRACED)
    scaled_codes: str = field(default="", metadata=NOT_TRACED)
    rope_scaling: RopeScaling | None = field(
        default=None, metadata={"traced": lambda scaling: scaling and asdict(scaling)}
    )
    world: int = 1
    vision: VisionConfig | None = field(
        default=None, metadata={"traced": lambda vision: vision and vision.mrope_section}
    )

    @property
    def linear_key_dim(self) -> int:
        """Features of all linear key heads together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Features of all linear value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def linear_proj_dim(self) -> int:
        """Rows of the merged GDN input projection q|k|v|z|b|a."""
        return self.linear_conv_dim + self.linear_value_dim + 2 * self.linear_num_value_heads

    @property
    def qkv_dim(self) -> int:
        """Rows of the merged attention projection (q and gate of each head)|k|v."""
        return 2 * (self.num_q_heads + self.num_kv_heads) * self.head_dim

    @property
    def is_moe(self) -> bool:
        """Whether every FFN is a mixture of experts."""
        return self.num_experts > 0

    @property
    def num_attention_layers(self) -> int:
        """Full-attention layers of the target model."""
        return sum(self.is_full_attention)

    @property
    def num_gdn_layers(self) -> int:
        """GDN layers of the target model."""
        return self.num_layers - self.num_attention_layers

    @property
    def active_weights(self) -> int:
        """Weights that multiply one token in all layers; embedding and head do not count."""
        hidden, ffn = self.hidden_size, 3 * self.intermediate_size
        if self.is_moe:
            experts = self.num_experts_per_tok * self.moe_intermediate_size
            ffn = self.num_experts + 3 * (experts + self.shared_expert_intermediate_size)
        attention = self.qkv_dim + self.num_q_heads * self.head_dim
        mixers = self.num_attention_layers * attention
        mixers += self.num_gdn_layers * (self.linear_proj_dim + self.linear_value_dim)
        return hidden * (mixers + self.num_layers * ffn)

    @property
    def head_vocab_size(self) -> int:
        """Rows of an untied output head on one rank; a tied head is the embedding, whole on each rank."""
        return self.vocab_size // self.world

    def shard(self, rank: int, world: int) -> ModelConfig:
        """Return the config of the part that rank `rank` of `world` holds.

        Heads, FFN widths and rows of the output head are divided. KV heads and linear key heads are
        replicated if there are fewer of them than ranks; hidden_size and vocab_size stay whole. Raises
        ValueError that names the size that `world` does not divide.
        """
        got, remedy = f"one rank of {self.world}", "shard it once"
        check(self.world == 1, "shard", "start from a whole model", got, remedy)
        check(world >= 1, "world", "be at least 1", world, "pass the number of ranks")
        check(0 <= rank < world, "rank", f"be 0 to {world - 1}", rank, "pass the rank's own number")
        if world == 1:
            return self
        divided = {name: getattr(self, name) for name in _DIVIDED}
        for name, count in {**divided, "vocab_size": self.vocab_size}.items():
            remedy = "use another number of ranks"
            check(count % world == 0, name, f"be a multiple of {world} ranks", count, remedy)
        for name in _REPLICATED:
            count = getattr(self, name)
            rule = f"be a multiple or a divisor of {world} ranks"
            check(count % world == 0 or world % count == 0, name, rule, count, "use another number of ranks")
        fields = {name: count // world for name, count in divided.items()}
        fields |= {name: max(getattr(self, name) // world, 1) for name in _REPLICATED}
        return replace(self, world=world, **fields)


def rank_range(count: int, rank: int, world: int) -> tuple[int, int]:
    """Return the range [begin, end) of `count` rows or heads that `rank` of `world` ranks holds.

    With more ranks than `count`, neighbouring ranks hold the same one.
    """
    first = rank * count // world
    return first, first + max(count // world, 1)
