"""The vision tower: a transformer over the patches of one image, and the merger of its cells.

It runs eagerly, one image at a time, so that an image's features depend on that image alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from compiled_mtp.model_config import VisionConfig
from compiled_mtp.vision.patches import patchify
from compiled_mtp.vision.sizes import PART_PATCHES, parts_of_layer

_EPS = 1e-6
_THETA = 10000.0


@dataclass(slots=True)
class Passage:
    """An image of N patches on its way through the tower, between two slices.

    x [N, hidden_size]: the residual stream after the finished layers. cos, sin [N, 1, head_dim] float32: the
    patches' angles. Inside a layer also q, k and v [1, heads, N, head_dim], and what the finished parts gave
    each of their patches, [n, hidden_size].
    """

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    qkv: tuple[torch.Tensor, ...] = ()
    attended: list[torch.Tensor] = field(default_factory=list)

    @property
    def layer_parts(self) -> int:
        """The parts of each layer."""
        return parts_of_layer(self.x.shape[0])


class VisionTower(nn.Module):
    """The tower of Qwen3.5; parameters have the names of the checkpoint after "model.visual.".

    `embed`, then `run` over all parts of all layers, in any number of slices, then `merge` turn the pixels of
    an image into features [rows * columns, out_hidden_size], one for each of its tokens. A part calls the
    same kernels with the same shapes in every slice, so slices change no bit. Source: Qwen3_5VisionModel of
    transformers. `empty_tower` makes one without initial values.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        size, inner = config.hidden_size, config.intermediate_size
        wide = size * config.merge_size**2
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.patch_values, size)})
        self.pos_embed = nn.Embedding(config.side**2, size)
        self.blocks = nn.ModuleList(_Block(size, config.num_heads, inner) for _ in range(config.depth))
        self.merger = nn.ModuleDict(
            {
                "norm": nn.LayerNorm(size, _EPS),
                "linear_fc1": nn.Linear(wide, wide),
                "linear_fc2": nn.Linear(wide, config.out_hidden_size),
            }
        )
        self.requires_grad_(False)

    def embed(self, pixels: torch.Tensor) -> Passage:
        """Begin an image [height, width, 3] uint8: its patches, and the position embeddings between the
        entries of the table that lie around them, are the first layer's input."""
        patches = patchify(pixels, self.config)
        x: torch.Tensor = self.patch_embed["proj"](patches.to(self.pos_embed.weight.dtype))
        grid = (pixels.shape[0] // self.config.patch_size, pixels.shape[1] // self.config.patch_size)
        side, table, position = self.config.side, self.pos_embed.weight.float(), x.new_zeros(x.shape).float()
        ends, places = [], _places(grid, self.config.merge_size, x.device)
        for place, count in zip(places, grid, strict=True):
            # The table's corners lie on the image's corners.
            at = place.float() * ((side - 1) / max(count - 1, 1))
            low, share = at.floor().long(), at - at.floor()
            ends.append(((low, 1 - share), ((low + 1).clamp(max=side - 1), share)))
        for row, row_share in ends[0]:
            for column, column_share in ends[1]:
                position += (row_share * column_share)[:, None] * table[row * side + column]
        half = self.config.hidden_size // self.config.num_heads // 2
        inverse = _THETA ** (-torch.arange(0, half, 2, device=x.device).float() / half)
        angles = torch.cat([place.float()[:, None] * inverse for place in places], 1)
        angles = torch.cat((angles, angles), 1)[:, None]
        return Passage(x + position.to(x.dtype), angles.cos(), angles.sin())

    def count_parts(self, num_tokens: int) -> int:
        """Parts of all layers for an image of num_tokens tokens."""
        return self.config.depth * parts_of_layer(num_tokens * self.config.merge_size**2)

    def run(self, passage: Passage, first: int, end: int) -> None:
        """Run parts `first` to `end` of an image; the parts of the first layer come first. Mutates
        `passage`."""
        for number in range(first, end):
            layer, part = divmod(number, passage.layer_parts)
            self.blocks[layer](passage, part)

    def merge(self, passage: Passage) -> torch.Tensor:
        """Features [N / merge_size^2, out_hidden_size] of an image after the last layer."""
        cells = self.merger["norm"](passage.x).view(-1, self.config.merge_size**2 * self.config.hidden_size)
        features: torch.Tensor = self.merger["linear_fc2"](F.gelu(self.merger["linear_fc1"](cells)))
        return features


class _Block(nn.Module):
    """norm, attention, norm, MLP around one residual stream."""

    def __init__(self, size: int, num_heads: int, inner: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = (nn.LayerNorm(size, _EPS) for _ in range(2))
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(size, inner), "linear_fc2": nn.Linear(inner, size)})

    def forward(self, passage: Passage, part: int) -> None:
        """Run a part, in which PART_PATCHES patches attend to all.

        The first also projects, and the last ends the layer.
        """
        if part == 0:
            passage.qkv = self._project(passage)
        q, k, v = passage.qkv
        own = q[:, :, part * PART_PATCHES : (part + 1) * PART_PATCHES]
        y = F.scaled_dot_product_attention(own, k, v)[0].transpose(0, 1)
        passage.attended.append(y.reshape(y.shape[0], -1))
        if part == passage.layer_parts - 1:
            del q, k, v, own, y
            passage.x = self._finish(passage)

    def _project(self, passage: Passage) -> tuple[torch.Tensor, ...]:
        x = passage.x
        q, k, v = self.attn["qkv"](self.norm1(x)).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        turned = (_turn(t, passage.cos, passage.sin) for t in (q, k))
        return tuple(t.transpose(0, 1)[None] for t in (*turned, v))

    def _finish(self, passage: Passage) -> torch.Tensor:
        passage.qkv, parts = (), passage.attended
        passage.attended = []
        x = passage.x + self.attn["proj"](parts[0] if len(parts) == 1 else torch.cat(parts))
        del parts
        inner = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        out: torch.Tensor = x + self.mlp["linear_fc2"](inner)
        return out


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [N, heads, head_dim] in float32 by the angles [N, 1, head_dim]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _places(grid: tuple[int, int], merge: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column [N] of each patch of a grid of patches, in the order of `patchify`."""
    rows, columns = grid
    ranges = (rows // merge, columns // merge, merge, merge)
    block_row, block_column, row, column = torch.meshgrid(
        *(torch.arange(count, device=device) for count in ranges), indexing="ij"
    )
    return (block_row * merge + row).flatten(), (block_column * merge + column).flatten()


def empty_tower(config: VisionConfig, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """A tower whose parameters are allocated and have no values yet."""
    with torch.device("meta"):
        tower = VisionTower(config)
    return tower.to(dtype).to_empty(device=device)


def random_tower(config: VisionConfig, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """A tower of random weights that keep activations near 1, for benchmarks."""
    tower, generator = empty_tower(config, dtype, device), torch.Generator(device).manual_seed(0)
    for name, parameter in tower.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return tower


def weight_bytes(config: VisionConfig, dtype: torch.dtype) -> int:
    """Bytes of a tower's parameters."""
    tower = empty_tower(config, dtype, torch.device("meta"))
    return sum(parameter.nbytes for parameter in tower.parameters())


def tower_bytes(config: VisionConfig, itemsize: int) -> int:
    """The most bytes that one image takes while the tower runs, features included.

    The residual stream, its norm, q|k|v or the inner activations, twice in float32 what is turned, the
    angles, and the copy of the patches, for the largest image.
    """
    patches = config.most_tokens * config.merge_size**2
    angles = 2 * config.hidden_size // config.num_heads
    widths = 2 * config.hidden_size + max(3 * config.hidden_size, 2 * config.intermediate_size)
    in_float32 = max(4 * config.hidden_size, 2 * config.patch_values)
    return patches * (widths * itemsize + (in_float32 + angles) * 4)
