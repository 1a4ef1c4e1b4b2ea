"""A product of a decode step, the ways to run it, and their inputs, bits, errors and times."""

from __future__ import annotations

import functools
import json
from dataclasses import astuple, dataclass
from typing import Any

import torch
from bench_op import ROTATED_BYTES
from op_cases.linear import BEFORE_NORM, GATE_UP

from compiled_mtp.benchmarks.gpu_rates import read_bandwidth, time_us
from compiled_mtp.ops.k_splits import add_tree, count_k_splits, part_counts
from compiled_mtp.ops.linear import linear, linear_partials, linear_silu_mul
from compiled_mtp.ops.linear.config import LinearConfig, choose, narrow_config, shared_split
from compiled_mtp.ops.linear.kernel import launch_config
from compiled_mtp.ops.linear.large_m_config import LargeMProduct, LargeMTile
from compiled_mtp.ops.linear.large_m_kernel import launch_large_m
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_partials
from compiled_mtp.ops.linear_w8a8.config import W8A8Config, configuration
from compiled_mtp.ops.linear_w8a8.kernel import launch_config as launch_w8a8
from compiled_mtp.ops.linear_w8a8.large_m_config import LargeMTile as LargeMTileW8A8
from compiled_mtp.ops.linear_w8a8.large_m_kernel import launch_large_m as launch_large_m_w8a8
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.rms_norm import add_rms_norm, rms_norm
from compiled_mtp.ops.silu_mul import silu_mul

# Only this architecture has large-M tiles in the tables, and w8a8 products.
ARCH = "sm_90"
DEVICE = "cuda"
MAX_SETS = 128
# Numbers of rows at which bits are compared, besides the timed number.
FEW_ROWS = (1, 4, 17)

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Product:
    """A merged weight [n, k] of a shape, and its recipe."""

    shape: str
    name: str
    n: int
    k: int
    recipe: str = "bf16"

    @property
    def gated(self) -> bool:
        return self.name == GATE_UP and self.recipe != "w8a8"

    @property
    def is_before_norm(self) -> bool:
        return self.name in BEFORE_NORM

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.recipe == "bf16" else torch.float8_e4m3fn

    @property
    def k_splits(self) -> int:
        """Return the number of K splits, the most partials of the product."""
        return count_k_splits(self.k) if self.is_before_norm else 1

    @property
    def chains(self) -> int:
        """Return the number of chains that sum K, over all programs."""
        return self.k_splits if self.is_before_norm else self.narrow.chains

    @property
    def narrow(self) -> LinearConfig:
        return narrow_config(ARCH, self.n, self.k, self.weight_dtype)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the possible numbers of partials, the table's first."""
        if not self.is_before_norm:
            return (1,)
        chosen = shared_split(ARCH, self.n, self.k, self.weight_dtype)
        return tuple(dict.fromkeys([chosen, *part_counts(self.k, self.k)]))

    @property
    def label(self) -> str:
        return f"{self.shape} {self.name} {self.n}x{self.k} {self.recipe}"

    @property
    def floor_us(self) -> float:
        """Return the microseconds of only reading the weight."""
        return self.n * self.k * self.weight_dtype.itemsize / bandwidth() * 1e6

    def large_m(self, count: int) -> LargeMProduct:
        """Return the product as large-M tiles take it, with `count` partials."""
        return LargeMProduct(self.n, self.k, count, self.chains // count, self.gated, self.is_before_norm)


@dataclass(frozen=True)
class Way:
    """One way to run a product of `rows` rows with `count` partials.

    kernel: "cuBLAS" (for FP8 with one factor per matrix); "operator", as it is; "plain", `linear_kernel`
    without descriptors; "tile", the kernel for the type of `tile`.
    """

    product: Product
    rows: int
    kernel: str
    count: int = 1
    tile: LinearConfig | LargeMTile | W8A8Config | LargeMTileW8A8 | None = None
    capability: int = 90

    @property
    def is_narrow(self) -> bool:
        """Return whether the way is for few rows, and timed among the kernels that run around it."""
        return isinstance(self.tile, LinearConfig)

    @property
    def label(self) -> str:
        own = self.kernel
        if self.tile is not None:
            kind = "left" if isinstance(self.tile, W8A8Config) else "narrow" if self.is_narrow else "large-m"
            own = f"{kind} {astuple(self.tile)}"
        return f"{self.product.label:32} {self.rows:4} rows {own} x{self.count:<2}"


def reference(product: Product, rows: int) -> Way:
    """Return the way whose bits all other ways must have."""
    if product.recipe != "w8a8":
        return Way(product, rows, "operator")
    return Way(product, rows, "tile", 1, configuration(rows, product.n, 1, product.k_splits))


def call(way: Way, x: Tensors, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Run a way; return [M, N], gated [M, N / 2], or partials [P, M, N], for the head in float32.

    x: the rows, and with w8a8 their factors.
    """
    own = way.product
    if own.recipe == "w8a8":
        return call_w8a8(way, x, weight, scale)
    (rows,) = x
    out_float32 = own.name == "lm_head" or (own.is_before_norm and way.count > 1)
    if way.kernel == "cuBLAS":
        return torch.mm(rows, weight.T)
    if isinstance(way.tile, LargeMTile):
        dtype = torch.float32 if out_float32 else rows.dtype
        return launch_large_m(way.tile, own.large_m(way.count), rows, weight, dtype)
    if isinstance(way.tile, LinearConfig):
        is_part = own.is_before_norm and way.count > 1
        return launch_config(way.tile, rows, weight, scale, is_part, keep_partials=own.is_before_norm)
    if way.kernel == "plain":
        config = choose(rows, weight, (0, 0), False, way.count if own.is_before_norm else 0)
        return launch_config(config, rows, weight, None, out_float32, own.gated, own.is_before_norm)
    if own.gated:
        return linear_silu_mul(rows, weight, scale)
    if own.is_before_norm:
        return linear_partials(rows, weight, scale, way.count)
    return linear(rows, weight, scale, out_float32)


def call_w8a8(way: Way, x: Tensors, weight: torch.Tensor, scale: Any) -> torch.Tensor:
    """Run a way on quantised rows, as `call` does."""
    own, (rows, factors) = way.product, x
    if way.kernel == "cuBLAS":
        one = factors.new_ones(())
        return torch._scaled_mm(rows, weight.T, one, one, out_dtype=torch.bfloat16)
    length, dtype = own.k // own.k_splits, torch.float32 if way.count > 1 else torch.bfloat16
    if isinstance(way.tile, W8A8Config):
        return launch_w8a8(way.tile, rows, factors, weight, scale, way.count, length, dtype)
    if isinstance(way.tile, LargeMTileW8A8):
        return launch_large_m_w8a8(way.tile, rows, factors, weight, scale, way.count, length, dtype)
    if own.is_before_norm:
        return linear_w8a8_partials(rows, factors, weight, scale, way.count)
    return linear_w8a8(rows, factors, weight, scale)


def sum_up(result: torch.Tensor) -> torch.Tensor:
    """Return the rounded result; partials are added as the norm adds them."""
    return add_tree(result).bfloat16() if result.dim() == 3 else result


def empty_inputs(way: Way, rows: int, device: torch.device) -> tuple[Tensors, torch.Tensor, Any]:
    """Return arguments of `call` without data."""
    own = way.product
    empty = functools.partial(torch.empty, device=device)
    weight, scale = empty(own.n, own.k, dtype=own.weight_dtype), None
    if own.recipe != "bf16":
        scale = empty(-(-own.n // 128), -(-own.k // 128))
    if own.recipe == "w8a8":
        return (empty(rows, own.k, dtype=own.weight_dtype), empty(rows, own.k // 128)), weight, scale
    return (empty(rows, own.k, dtype=torch.bfloat16),), weight, scale


@functools.lru_cache(maxsize=1)
def weights_of(product: Product) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return sets of weight and scale that together are larger than L2."""
    torch.cuda.empty_cache()
    n, k, made = product.n, product.k, []
    sets = max(2, min(MAX_SETS, int(ROTATED_BYTES // (n * k * product.weight_dtype.itemsize)) + 1))
    for _ in range(sets):
        weight, scale = torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE), None
        if product.recipe == "bf16":
            weight.mul_(k**-0.5)
        else:
            scale = torch.rand(-(-n // 128), -(-k // 128), device=DEVICE) * 1e-3 + 1e-4
        made.append(((weight if scale is None else weight * 50).to(product.weight_dtype), scale))
    return made


@functools.lru_cache(maxsize=4)
def rows_of(product: Product, rows: int) -> Tensors:
    """Return the same random rows for every way."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x = torch.randn(rows, product.k, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    return quantize_rows(x) if product.recipe == "w8a8" else (x,)


def first(x: Tensors, rows: int) -> Tensors:
    return tuple(tensor[:rows] for tensor in x)


def result_of(way: Way, rows: int) -> torch.Tensor:
    """Return a way's result for the first `rows` rows."""
    return sum_up(call(way, first(rows_of(way.product, way.rows), rows), *weights_of(way.product)[0]))


@functools.lru_cache(maxsize=4)
def wanted_of(product: Product, rows: int) -> torch.Tensor:
    """Return the reference's result; raises AssertionError if its bits depend on the number of rows."""
    way = reference(product, rows)
    wanted = result_of(way, rows)
    for few in FEW_ROWS:
        assert torch.equal(result_of(way, few), wanted[:few]), "rows depend on M"
    return wanted


def has_same_bits(way: Way) -> bool:
    """Return whether a way gives the reference's bits, with all rows and with few."""
    wanted = wanted_of(way.product, way.rows)
    counts = [rows for rows in (*FEW_ROWS, way.rows) if rows <= way.rows]
    return all(torch.equal(result_of(way, rows), wanted[:rows]) for rows in counts)


@functools.cache
def bandwidth() -> float:
    return read_bandwidth()


def with_neighbours(way: Way, x: Tensors, weight: torch.Tensor, scale: torch.Tensor | None) -> Any:
    """Run a way with the norm that adds its partials; for few rows also with the kernel that makes its input.

    That kernel is a norm if n > k, otherwise silu_mul.
    """
    own, rows = way.product, way.rows
    buffer = functools.partial(neighbour, rows)
    if way.is_narrow:
        wide = own.n > own.k
        x = (rms_norm(x[0], buffer(own.k)[0], 1e-6) if wide else silu_mul(buffer(2 * own.k)),)
    made = call(way, x, weight, scale)
    return add_rms_norm(made, buffer(own.n), buffer(own.n)[0], 1e-6) if own.is_before_norm else made


@functools.lru_cache(maxsize=8)
def neighbour(rows: int, width: int) -> torch.Tensor:
    """Return inputs for the kernels around a product."""
    return torch.randn(rows, width, dtype=torch.bfloat16, device=DEVICE)


def time_way(way: Way) -> str:
    """Check and time one way; return a JSON object.

    For few rows, a product that no norm follows may have other bits: its table decides them.
    """
    own, sets, x = way.product, weights_of(way.product), rows_of(way.product, way.rows)
    found: dict[str, Any] = {"floor_us": own.floor_us, "same_bits": None}
    if way.kernel != "cuBLAS" and (own.is_before_norm or not way.is_narrow):
        found["same_bits"] = has_same_bits(way)
    rounds = max(1, (6 if own.n > 1 << 16 else 16) // len(sets))
    found["us"] = time_us([functools.partial(call, way, x, *args) for args in sets] * rounds)
    if way.kernel != "cuBLAS" and (own.is_before_norm or way.is_narrow):
        calls = [functools.partial(with_neighbours, way, x, *args) for args in sets] * rounds
        found["decisive_us"] = time_us(calls)
    return json.dumps(found)
