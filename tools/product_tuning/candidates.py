"""The products that each kind of tuning tries, and the ways to run them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from op_cases import SHAPES
from op_cases.linear import projections

from compiled_mtp.ops.k_splits import count_k_splits, part_counts
from compiled_mtp.ops.linear.config import LinearConfig, with_k_splits
from compiled_mtp.ops.linear.large_m_config import LargeMTile
from compiled_mtp.ops.linear.large_m_config import ranked_tiles as ranked_large_m
from compiled_mtp.ops.linear_w8a8.config import W8A8Config, configuration
from compiled_mtp.ops.linear_w8a8.large_m_config import choose_tile, row_class
from compiled_mtp.ops.linear_w8a8.large_m_config import ranked_tiles as ranked_w8a8
from product_tuning.ways import Product, Way

SHARED_BYTES = 227 * 1024
NOT_TIMED = ("router", "mtp_fc")
# How many large-M tiles are tried per number of partials; in FP8, per number of programs on a processor.
KEPT, KEPT_W8A8 = 3, 2
FIRST_PREFETCH = 512

# (block_n, block_k of one chain, chains, warps, stages)
BF16_TILES = [
    *[(16, 64, 4, w, s) for w in (1, 2, 4) for s in (3, 4)],
    *[(16, 128, 4, w, s) for w in (2, 4) for s in (2, 3)],
    *[(16, 128, 2, w, 4) for w in (2, 4)],
    (16, 128, 1, 2, 8),
    *[(32, 64, 4, w, s) for w in (2, 4) for s in (3, 4)],
    *[(32, 128, 2, w, s) for w in (2, 4) for s in (3, 4)],
    (32, 64, 2, 2, 6),
    (32, 128, 1, 2, 6),
    *[(64, 64, 2, w, s) for w in (2, 4) for s in (3, 4)],
    *[(64, 64, 4, 4, s) for s in (2, 3)],
    *[(64, 128, 1, 4, s) for s in (3, 4)],
    *[(64, 128, 2, 4, s) for s in (2, 3)],
    (128, 64, 1, 4, 4),
    (128, 64, 2, 4, 3),
    (128, 128, 1, 4, 3),
    *[(16, 128, 1, w, s) for w in (1, 2) for s in (3, 4)],
    *[(32, 64, 1, w, 4) for w in (1, 2)],
    *[(32, 128, 1, w, s) for w in (1, 2, 4) for s in (3, 4)],
    *[(64, 64, 1, w, 4) for w in (2, 4)],
]
FP8_TILES = [
    *[(16, 128, 4, w, 3) for w in (1, 2)],
    (16, 128, 2, 2, 4),
    *[(32, 128, 4, w, s) for w in (1, 2) for s in (2, 3)],
    *[(32, 128, 2, w, s) for w in (1, 2) for s in (3, 4)],
    (32, 128, 1, 2, 6),
    *[(64, 128, 2, w, s) for w in (2, 4) for s in (3, 4)],
    *[(64, 128, 1, w, s) for w in (2, 4) for s in (4, 6)],
    (64, 128, 4, 2, 2),
    (64, 128, 4, 4, 3),
    *[(128, 128, 1, w, s) for w in (4, 8) for s in (3, 4)],
    *[(128, 128, 2, 4, s) for s in (2, 3)],
]
# Tiles of FP8 products with the weight as left operand (block_m, block_n, warps, stages), by the most rows
# for which they are meant.
LEFT_TILES = {
    16: [(16, 128, 4, 3), (16, 128, 4, 4), (16, 128, 4, 6), (16, 128, 4, 8), (16, 64, 4, 6), (16, 64, 4, 8)],
    32: [(32, 128, 4, 3), (32, 128, 4, 4), (32, 128, 4, 6), (32, 64, 4, 6), (32, 64, 4, 8)],
    256: [
        *[(64, 128, 8, 4), (64, 64, 4, 5), (128, 64, 8, 4), (128, 64, 4, 6)],
        *[(128, 128, 8, 3), (128, 128, 8, 4)],
    ],
}
# With so many sums per thread, registers cannot also hold the sums of a program's earlier K splits.
MOST_SUMS = 64


def products_of(
    shapes: Iterable[str], recipes: Iterable[str], names: Sequence[str] = (), without: Sequence[str] = ()
) -> list[Product]:
    """Return the named products, or all, once per size: each shape's largest weight first, its head last."""
    found: dict[object, Product] = {}
    for shape, recipe in itertools.product(shapes, recipes):
        sizes = projections(SHAPES[shape], recipe != "bf16")
        for name in sorted(sizes, key=lambda name: (name == "lm_head", -sizes[name][0] * sizes[name][1])):
            if name not in without and (not names or name in names):
                found.setdefault((sizes[name], recipe), Product(shape, name, *sizes[name], recipe))
    return list(found.values())


def narrow_configs(product: Product) -> list[LinearConfig]:
    """Return the configurations for few rows that are worth timing.

    They have enough programs to fill the GPU, and parts of K that are long enough to stream. Before a norm
    every tile sums the product's K splits apart.
    """
    n, k, is_fp8 = product.n, product.k, product.recipe != "bf16"
    result = []
    splits = part_counts(k, k) if product.is_before_norm else (1, 2, 4, 8)
    for (block_n, block_k, chains, warps, stages), split in itertools.product(
        FP8_TILES if is_fp8 else BF16_TILES, splits
    ):
        config = LinearConfig(16, block_n, block_k, warps, stages, split, chains, FIRST_PREFETCH)
        if product.is_before_norm:
            config = with_k_splits(config, count_k_splits(k), split, is_fp8)
        programs = -(-n // block_n) * split
        is_long = split == 1 or (config.part_length(k) * config.chains >= 512 and programs <= 700)
        if config.is_even(k) and is_long and programs >= min(60, n // 16):
            result.append(config)
    return list(dict.fromkeys([*result, *one_step_configs(product)]))


def one_step_configs(product: Product) -> Iterator[LinearConfig]:
    """Configurations whose programs hold all their weights in registers, few enough to run all at once."""
    n, k, dtype = product.n, product.k, product.weight_dtype
    block_ks = (128,) if dtype.itemsize == 1 else (128, 256, 512)
    for split, block_n, block_k, warps in itertools.product(
        (1, 2, 4, 8), (16, 32, 64), block_ks, (1, 2, 4, 8)
    ):
        chains, programs = k // (split * block_k), -(-n // block_n) * split
        registers = block_n * chains * block_k * dtype.itemsize // (warps * 32 * 4)
        is_whole = chains in (2, 4, 8) and k == split * chains * block_k
        is_shared = not product.is_before_norm or split * chains == count_k_splits(k)
        fits = 16 <= registers <= 128 and 100 <= programs <= 1056 and block_n >= 8 * warps // 2
        if is_whole and is_shared and fits:
            yield LinearConfig(16, block_n, block_k, warps, 2, split, chains, 0)


def fits_large_m(product: Product) -> bool:
    """Return whether large-M tiles can run the product: K must divide evenly."""
    return product.k % (product.chains * 128) == 0 and (product.is_before_norm or product.narrow.split == 1)


def large_m_tiles(product: Product, rows: int, count: int) -> list[LargeMTile]:
    """Return the tiles that should waste least with `count` partials; for the table's count also variants."""
    tiles = [tile for _, tile in ranked_large_m(product.large_m(count), rows, SHARED_BYTES)[:KEPT]]
    if tiles and count == product.counts[0]:
        best = tiles[0]
        tiles += [replace(best, prefetch_bytes=0), replace(best, num_stages=best.num_stages - 1)]
        if best.num_stages >= 4:
            tiles.append(replace(best, block_k=128, num_stages=best.num_stages // 2))
    return tiles


def large_m_ways(product: Product, rows: int) -> Iterator[Way]:
    """Yield the ways for more than 16 rows in bfloat16.

    They are cuBLAS, and per number of partials the operator, the kernel without descriptors, and tiles.
    """
    yield Way(product, rows, "cuBLAS")
    for count in product.counts:
        yield Way(product, rows, "operator", count)
        yield Way(product, rows, "plain", count)
        for tile in large_m_tiles(product, rows, count):
            yield Way(product, rows, "tile", count, tile)


def w8a8_ways(product: Product, rows: int) -> Iterator[Way]:
    """Yield cuBLAS, and per number of partials the tile in use, tiles with the weight on the left, and
    large-M tiles.
    """
    yield Way(product, rows, "cuBLAS")
    n, k, k_splits = product.n, product.k, product.k_splits
    for count in part_counts(k, k) if product.is_before_norm else (1,):
        tiles: list[Any] = [configuration(rows, n, count, k_splits // count)]
        for fields in next(tiles for most, tiles in LEFT_TILES.items() if rows <= most):
            left = W8A8Config(*fields)
            if k_splits == count or left.block_m * left.block_n // (32 * left.num_warps) < MOST_SUMS:
                tiles.append(left)
        chosen = choose_tile(n, k, count, k // k_splits, row_class(rows), SHARED_BYTES)
        tiles += [chosen] if chosen else []
        for programs in (1, 2, 3):
            ranked = ranked_w8a8(n, k_splits // count, count, row_class(rows), SHARED_BYTES, programs)
            tiles += ranked[:KEPT_W8A8]
        for tile in dict.fromkeys(tiles):
            yield Way(product, rows, "tile", count, tile)


def ways_of(kind: str, product: Product, rows: int) -> list[Way]:
    """Return all ways that a kind of tuning times for a product with `rows` rows."""
    if kind == "narrow":
        configs = narrow_configs(product)
        return [Way(product, rows, "tile", config.split, config) for config in configs]
    return [*(w8a8_ways(product, rows) if kind == "w8a8" else large_m_ways(product, rows))]
