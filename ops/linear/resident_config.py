"""Which products of few rows load their whole weight into shared memory ahead of time, and how.

They load it before the previous kernel has ended. That pays where all of a weight fits at once, as those of
0.8B do: a chain of such products waits for its
activations alone. `tools/tune_products.py held` measures the table, resident.json. The table decides no
bit, as the parts of K are those of config.py (tests/gpu/test_resident.py compares them with `linear_kernel`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from compiled_mtp.ops.descriptors import is_describable
from compiled_mtp.ops.device import Device, device_of
from compiled_mtp.ops.k_splits import NARROW_ROWS
from compiled_mtp.ops.linear.config import PROCESSORS, LinearConfig, choose
from compiled_mtp.ops.linear.large_m_config import ARCH, LargeMProduct

RESIDENT_TABLE = Path(__file__).with_name("resident.json")
# Columns that a row of a piece has at least, so that shared memory is read without conflicts.
LEAST_PIECE = 64


@dataclass(frozen=True)
class ResidentTile:
    """Weight rows of a tile, 16 a warp; the most columns of a piece, which is asked for at once; and how many
    pieces may be on their way when the next is asked for: with all of them activations would stand behind
    them."""

    block_n: int
    piece: int
    in_flight: int

    def pieces(self, length: int) -> list[int]:
        """The powers of two that a chain of so many columns is cut into."""
        found: list[int] = []
        while length:
            found.append(min(self.piece, 1 << (length.bit_length() - 1)))
            length -= found[-1]
        return found


@functools.cache
def read_resident_table() -> dict[str, list[int]]:
    """Name of a product -> the fields of ResidentTile in order, as measured."""
    table: dict[str, list[int]] = json.loads(RESIDENT_TABLE.read_text())
    return table


def resident_tile(product: LargeMProduct) -> ResidentTile | None:
    """The measured tile of a product, None where `linear_kernel` does it."""
    fields = read_resident_table().get(product.name)
    return None if fields is None else ResidentTile(*fields)


def find_resident(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    config: LinearConfig,
    gated: bool = False,
    keep_partials: bool = False,
) -> ResidentTile | None:
    """The tile of a product of up to 16 bfloat16 rows that holds its weight, or None.

    None in the interpreter and on other GPUs than that which was measured and its like, with fewer processors
    too, on which not all programs would have their place; and where rows of either operand do not begin at
    multiples of 16 numbers: Triton then copies in smaller pieces than there are.
    """
    if x.shape[0] > NARROW_ROWS or device.arch != ARCH or not device.has_dependent_launch:
        return None
    if device.num_processors < PROCESSORS or any(matrix.stride(0) % 16 for matrix in (x, weight)):
        return None
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return None
    (n, k) = weight.shape
    product = LargeMProduct(n, k, config.split, config.chains, gated, keep_partials)
    is_possible = product.is_even and is_describable(x) and is_describable(weight)
    return resident_tile(product) if is_possible else None


def can_be_resident(weight: torch.Tensor, partials: int = 0, gated: bool = False) -> bool:
    """Whether a product of few rows with this weight may be launched so, and then is no fence (`Launch`).

    parts: of a product before a norm, in how many parts it is left; 0 of others.
    """
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    row = weight[:1]
    config = choose(row, weight, (0, 0), False, partials)
    return find_resident(device_of(weight.device.index), row, weight, config, gated, partials > 0) is not None
