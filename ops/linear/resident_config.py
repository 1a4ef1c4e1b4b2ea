"""Chooses which products of few rows load their whole weight into shared memory early, and by which tile.

They load it before the previous kernel ends. This is faster if all of a weight fits at once, as 0.8B's do: a
chain of such products waits for activations alone. `tools/tune_products.py held` measures the table,
resident.json. The table changes no bit: the K splits are those of config.py (tests/gpu/test_resident.py
compares the bits with those of `linear_kernel`).
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
# The fewest columns of one copy that can be read from shared memory without bank conflicts.
LEAST_PIECE = 64


@dataclass(frozen=True)
class ResidentTile:
    """A tile of a product with resident weights.

    block_n: weight rows, 16 per warp. piece: the most columns that one copy requests. in_flight: how many
    copies may be unfinished when a program requests the next; with all of them in flight, the loads of
    activations would queue after them.
    """

    block_n: int
    piece: int
    in_flight: int

    def pieces(self, length: int) -> list[int]:
        """Return the columns of each copy of a chain of `length` columns: powers of two."""
        found: list[int] = []
        while length:
            found.append(min(self.piece, 1 << (length.bit_length() - 1)))
            length -= found[-1]
        return found


@functools.cache
def read_resident_table() -> dict[str, list[int]]:
    """Return name of a product -> the measured fields of ResidentTile, in order."""
    table: dict[str, list[int]] = json.loads(RESIDENT_TABLE.read_text())
    return table


def resident_tile(product: LargeMProduct) -> ResidentTile | None:
    """Return the measured tile of a product, None if `linear_kernel` computes it."""
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
    """Return the tile for a product of up to 16 bfloat16 rows with resident weights, None if it cannot be.

    It cannot in the interpreter, on a GPU of another architecture than the measured one, or with fewer
    processors, where not all programs would run at once. Rows of both operands must begin at multiples of 16
    numbers: otherwise Triton would need copies of fewer bytes than the hardware offers.
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
    """Return whether a product of few rows may keep this weight resident; it is then no fence (`Launch`).

    partials: the number of partials of a product before a norm, 0 for other products.
    """
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    row = weight[:1]
    config = choose(row, weight, (0, 0), False, partials)
    return find_resident(device_of(weight.device.index), row, weight, config, gated, partials > 0) is not None
