"""Calls of the operators, at the shapes of published models, whose kernels are compiled without a GPU.

`cases(operator, capability)` gives those of one folder of ops/. They name shapes and dtypes only: which
kernel a call launches, and how, is recorded from the operator (record_launches.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from op_cases.linear import multiply

from compiled_mtp.ops.features import RECENT_IDS
from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.gdn_verify import gdn_verify
from compiled_mtp.ops.linear import count_parts, linear, linear_beside, linear_parts, linear_silu_mul
from compiled_mtp.ops.linear.config import NAMED_DTYPES, dtype_name, read_table
from compiled_mtp.ops.linear.held_config import read_held_table
from compiled_mtp.ops.linear.tall_config import read_tall_table
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_parts
from compiled_mtp.ops.moe_experts import (
    moe_experts,
    moe_experts_w8a8,
    moe_hidden,
    moe_hidden_w8a8,
    moe_sums,
    moe_sums_w8a8,
)
from compiled_mtp.ops.moe_router import moe_router
from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized, pair_norm, rms_norm
from compiled_mtp.ops.row_logprobs import row_logprobs
from compiled_mtp.ops.sample import SamplingTables, filter_logits, sample
from compiled_mtp.ops.silu_mul import silu_mul, silu_mul_quantized
from compiled_mtp.ops.spec_conv1d import conv_prefill, spec_conv1d
from compiled_mtp.ops.window import Cursors, History, accept_window, read_window

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
INT32, INT64 = torch.int32, torch.int64
FP8_CAPABILITY = 89  # ops.fp8.converts_fp8
WINDOW = 4
ROWS = WINDOW  # one request
PREFILL_ROWS = 2048
SLOTS = 9
BLOCK_SIZE, MAX_BLOCKS = 64, 128
VOCAB = 248320
EPS = 1e-6


@dataclass(frozen=True)
class LaunchCase:
    """One call. label: unique in its folder, and stable, since the recorded table is keyed by it.

    call(device): makes the arguments there and calls the operator. min_capability: of the GPUs that are ever
    asked for it (major * 10 + minor).
    """

    label: str
    call: Callable[[torch.device], object]
    min_capability: int = 80


def tensor(device: torch.device, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def projection(device: torch.device, rows: int, value_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """q|k|v|z|b|a of a GDN layer with 16 key heads."""
    return tensor(device, rows, 4096 + 2 * value_heads * 128 + 2 * value_heads, dtype=dtype)


def gate(device: torch.device, rows: int, value_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """The columns z of such a projection."""
    first = 4096 + value_heads * 128
    return projection(device, rows, value_heads, dtype)[:, first : first + value_heads * 128]


def delta_rule(device: torch.device, value_heads: int, dtype: torch.dtype, ring: int | None) -> None:
    """gdn_verify over one window, or without a ring gdn_prefill."""
    empty = functools.partial(tensor, device)
    rows = ROWS if ring else PREFILL_ROWS
    state = empty(SLOTS, value_heads, 128, 128)
    inputs = (
        empty(rows, 16, 128), empty(rows, 16, 128), empty(rows, value_heads, 128), empty(rows, value_heads),
        empty(rows, value_heads), gate(device, rows, value_heads, dtype), empty(128), state,
    )  # fmt: skip
    cursors = (empty(1, dtype=INT32), empty(1, dtype=INT64), empty(1, dtype=INT64))
    if ring is None:
        gdn_prefill(*inputs, *cursors, empty(1, dtype=INT64), EPS, "silu")
        return
    rings = (
        empty(SLOTS, 16, ring, 128), empty(SLOTS, value_heads, ring, 128), empty(SLOTS, value_heads, ring)
    )  # fmt: skip
    gdn_verify(*inputs, *rings, *cursors, EPS, "silu")


def convolution(
    device: torch.device, value_heads: int, dtype: torch.dtype, prefill: bool, requests: int = 1
) -> None:
    empty = functools.partial(tensor, device)
    channels = 4096 + value_heads * 128
    rows = PREFILL_ROWS if prefill else requests * ROWS
    inputs = (
        projection(device, rows, value_heads, dtype), empty(channels, 4, dtype=dtype), empty(value_heads),
        empty(value_heads), empty(SLOTS, 8, channels, dtype=dtype), empty(requests, dtype=INT32),
    )  # fmt: skip
    start, length, first_row = (empty(requests, dtype=INT64) for _ in range(3))
    heads = (16, value_heads, 128, 128)
    if prefill:
        conv_prefill(*inputs, start, length, first_row, *heads)
    else:
        spec_conv1d(*inputs, start, *heads)


def gdn_prefill_cases(capability: int) -> Iterator[LaunchCase]:
    for heads, dtype in ((48, BF16), (32, BF16), (16, BF16), (16, FP32)):
        call = functools.partial(delta_rule, value_heads=heads, dtype=dtype, ring=None)
        yield LaunchCase(f"{heads}-{dtype_name(dtype)}", call)


def gdn_verify_cases(capability: int) -> Iterator[LaunchCase]:
    for heads, dtype, ring in (
        (48, BF16, 8),
        (48, BF16, 16),
        (48, FP32, 8),
        (32, BF16, 8),
        (16, BF16, 8),
    ):
        call = functools.partial(delta_rule, value_heads=heads, dtype=dtype, ring=ring)
        yield LaunchCase(f"{heads}-{dtype_name(dtype)}-ring{ring}", call)


def spec_conv1d_cases(capability: int) -> Iterator[LaunchCase]:
    for heads, dtype in ((48, BF16), (32, BF16), (16, BF16), (16, FP32)):
        for prefill in (False, True):
            call = functools.partial(convolution, value_heads=heads, dtype=dtype, prefill=prefill)
            yield LaunchCase(f"{heads}-{dtype_name(dtype)}", call)
        many = functools.partial(convolution, value_heads=heads, dtype=dtype, prefill=False, requests=32)
        yield LaunchCase(f"{heads}-{dtype_name(dtype)}-windows", many)


def product(
    device: torch.device,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    kind: str,
    prefill: bool = False,
    gap: int = 0,
) -> None:
    """linear ("product", or "logits" in float32), linear_silu_mul ("gated"), linear_parts ("parts") or
    linear_beside ("beside").

    gap: numbers between two rows; with 1 they have no descriptor.
    """
    empty = functools.partial(tensor, device)
    x = empty(rows, k + gap, dtype=FP32 if dtype == FP32 else BF16)[:, :k]
    weight = empty(n, k, dtype=dtype)
    scale = empty(-(-n // 128), -(-k // 128)) if dtype == FP8 else None
    if kind == "gated":
        linear_silu_mul(x, weight, scale)
    elif kind == "parts":
        linear_parts(x, weight, scale, count_parts(weight, rows))
    elif kind == "beside":
        linear_beside(x, weight)
    else:
        linear(x, weight, scale, kind == "logits", prefill)


def linear_cases(capability: int) -> Iterator[LaunchCase]:
    """Each kind of product at each height of a tile, then each measured weight of this GPU."""
    for n, k, dtype in (
        (34816, 5120, BF16),
        (5120, 6144, BF16),
        (1024, 3584, BF16),
        (34816, 5120, FP8),
        (2560, 9216, FP8),
        (1024, 2048, FP32),
        # In no measured table: the rule chooses the tile.
        (8192, 3072, BF16),
        (8192, 3072, FP8),
    ):
        name = f"{n}x{k}-{dtype_name(dtype)}"
        for rows in (4, 20, 50, 100):
            shape = functools.partial(product, rows=rows, n=n, k=k, dtype=dtype)
            kinds = ["product", *(["gated"] if n == 34816 else []), *(["parts"] if k > n else [])]
            for kind in kinds:
                label = f"{kind}-{name}-{rows}"
                yield LaunchCase(label, functools.partial(shape, kind=kind), capability_of(dtype))
                if dtype == BF16 and rows != 4:
                    without = functools.partial(shape, kind=kind, gap=1)
                    yield LaunchCase(f"{label}-unaligned", without)
            if dtype == FP8 and rows == 100:
                call = functools.partial(shape, kind="product", prefill=True)
                yield LaunchCase(f"prefill-{name}-{rows}", call, FP8_CAPABILITY)
    for n, k in ((34816, 5120), (2560, 9216), (2560, 2560)):
        for rows in (40, 512, 2048):
            call = functools.partial(product, rows=rows, n=n, k=k, dtype=BF16, kind="product", prefill=True)
            yield LaunchCase(f"prefill-{n}x{k}-{rows}", call)
    # The router's: its rows lie at no multiple of 16 bytes.
    router = functools.partial(product, rows=512, n=257, k=2048, dtype=BF16, kind="logits", prefill=True)
    yield LaunchCase("prefill-logits-257x2048", router)
    # b|a of 27B's FP8 release, and of a model in float32.
    for rows, dtype in ((4, BF16), (128, BF16), (4, FP32)):
        call = functools.partial(product, rows=rows, n=96, k=5120, dtype=dtype, kind="beside")
        yield LaunchCase(f"beside-96x5120-{dtype_name(dtype)}-{rows}", call)
    yield from tall_cases()
    yield from held_cases()
    for entry in read_table().get(f"sm_{capability}", {}):
        size, dtype_text = entry.split()
        n, k = map(int, size.split("x"))
        # The head and the router give float32.
        kind = "logits" if n in (VOCAB, 257) else "product"
        dtype = NAMED_DTYPES[dtype_text]
        call = functools.partial(product, rows=ROWS, n=n, k=k, dtype=dtype, kind=kind)
        yield LaunchCase(f"{kind}-{size}-{dtype_text}", call, capability_of(dtype))


def tall_cases() -> Iterator[LaunchCase]:
    """Each measured product of many rows at each height of a tile, the head, and pieces of weights."""
    products: dict[str, tuple[int, ...]] = dict.fromkeys(read_tall_table(), (20, 100, 200))
    more = (f"{VOCAB}x5120 logits", "5120x2176 parts1", "4352x5120 gated")
    products |= dict.fromkeys(more, (20, 100))
    for name, heights in products.items():
        size, kind = name.split()
        n, k = map(int, size.split("x"))
        whole = {"5120x2176": (0, 17408), "4352x5120": (34816, 0)}.get(size, (0, 0))
        for rows in heights:
            call = functools.partial(tall_product, rows=rows, n=n, k=k, kind=kind, whole=whole)
            yield LaunchCase(f"tall-{size}-{kind}-{rows}", call)


def held_cases() -> Iterator[LaunchCase]:
    """Each product whose weight is held, at both heights of a tile."""
    for name in read_held_table():
        size, kind = name.split()
        n, k = map(int, size.split("x"))
        for rows in (4, 12):
            call = functools.partial(tall_product, rows=rows, n=n, k=k, kind=kind, whole=(0, 0), held=True)
            yield LaunchCase(f"held-{size}-{kind}-{rows}", call)


def tall_product(
    device: torch.device,
    rows: int,
    n: int,
    k: int,
    kind: str,
    whole: tuple[int, int],
    held: bool = False,
) -> None:
    """As a name in the table of tiles has it; whole: N and K of the weight, where it is a piece."""
    multiply(tensor(device, rows, k, dtype=BF16), tensor(device, n, k, dtype=BF16), kind, whole, held)


def capability_of(dtype: torch.dtype) -> int:
    return FP8_CAPABILITY if dtype == FP8 else 80


def w8a8_product(device: torch.device, rows: int, n: int, k: int, count: int, gap: int = 0) -> None:
    """linear_w8a8 ("count" 0) or linear_w8a8_parts in that many parts; gap: bytes between two rows."""
    x, weight = tensor(device, rows, k + gap, dtype=FP8)[:, :k], tensor(device, n, k, dtype=FP8)
    scales = tensor(device, rows, k // 128), tensor(device, -(-n // 128), k // 128)
    if count:
        linear_w8a8_parts(x, scales[0], weight, scales[1], count)
    else:
        linear_w8a8(x, scales[0], weight, scales[1])


def linear_w8a8_cases(capability: int) -> Iterator[LaunchCase]:
    """Each height of a tile, whole and in each number of parts."""
    for rows in (4, 20, 50, 100):
        for n, k, counts in ((34816, 5120, (0,)), (5120, 17408, (1, 2, 4, 8))):
            for count in counts:
                call = functools.partial(w8a8_product, rows=rows, n=n, k=k, count=count)
                yield LaunchCase(f"{n}x{k}-{rows}" + f"-parts{count}" * (count > 0), call, 90)

    for rows, n, k, counts in (
        (20, 16384, 5120, (0,)),
        (200, 34816, 5120, (0,)),
        (2048, 34816, 5120, (0,)),
        (100, 5120, 6144, (1, 2, 4, 8)),
        (2048, 5120, 17408, (0,)),
    ):
        for count in counts:
            call = functools.partial(w8a8_product, rows=rows, n=n, k=k, count=count)
            yield LaunchCase(f"tall-{n}x{k}-{rows}" + f"-parts{count}" * (count > 0), call, 90)
    # Rows at no multiple of 16 bytes.
    for rows in (20, 50, 100):
        for count in (0, 1, 4):
            call = functools.partial(w8a8_product, rows=rows, n=5120, k=17408, count=count, gap=8)
            yield LaunchCase(f"unaligned-{rows}" + f"-parts{count}" * (count > 0), call, 90)


def quantize_rows_cases(capability: int) -> Iterator[LaunchCase]:
    yield LaunchCase(
        "5120", lambda device: quantize_rows(tensor(device, ROWS, 5120, dtype=BF16)), FP8_CAPABILITY
    )


def experts(device: torch.device, rows: int, dtype: torch.dtype, prefill: bool) -> None:
    """256 experts of 512 and the shared one, eight a token."""
    empty = functools.partial(tensor, device)
    count, width, inner = 257, 2048, 512
    scales: Any = (None, None)
    if dtype == FP8:
        scales = (empty(count, 2 * inner // 128, width // 128), empty(count, width // 128, inner // 128))
    x = empty(rows, width, dtype=FP32 if dtype == FP32 else BF16)
    gate_up, down = empty(count, 2 * inner, width, dtype=dtype), empty(count, width, inner, dtype=dtype)
    moe_experts(x, empty(rows, 9), empty(rows, 9, dtype=INT32), gate_up, down, scales[0], scales[1], prefill)


def w8a8_experts(device: torch.device, rows: int) -> None:
    """The same in FP8, of quantised rows."""
    empty = functools.partial(tensor, device)
    count, width, inner = 257, 2048, 512
    x = empty(rows, width, dtype=FP8), empty(rows, width // 128)
    routes = empty(rows, 9), empty(rows, 9, dtype=INT32)
    stacks = empty(count, 2 * inner, width, dtype=FP8), empty(count, width, inner, dtype=FP8)
    scales = empty(count, 2 * inner // 128, width // 128), empty(count, width // 128, inner // 128)
    moe_experts_w8a8(*x, *routes, *stacks, *scales)


def halves_of_experts(device: torch.device, rows: int, is_fp8: bool) -> None:
    """What one of two ranks makes of them: half of the hidden columns, and half of the sums."""
    empty = functools.partial(tensor, device)
    count, width, inner = 257, 1024, 256
    ids, weights = empty(rows, 9, dtype=INT32), empty(rows, 9)
    if is_fp8:
        x = empty(rows, 2 * width, dtype=FP8), empty(rows, 2 * width // 128)
        stack = empty(count, 2 * inner, 2 * width, dtype=FP8), empty(count, 4, 16)
        moe_hidden_w8a8(*x, ids, *stack)
        hidden = empty(9 * rows, 2 * inner, dtype=FP8), empty(9 * rows, 4)
        stack = empty(count, width, 2 * inner, dtype=FP8), empty(count, 8, 4)
        moe_sums_w8a8(*hidden, weights, ids, *stack)
    else:
        moe_hidden(empty(rows, 2 * width, dtype=BF16), ids, empty(count, 2 * inner, 2 * width, dtype=BF16))
        hidden_rows = empty(9 * rows, 2 * inner, dtype=BF16)
        moe_sums(hidden_rows, weights, ids, empty(count, width, 2 * inner, dtype=BF16))


def moe_experts_cases(capability: int) -> Iterator[LaunchCase]:
    for name, rows in (("w8a8", ROWS), ("tall-w8a8", PREFILL_ROWS)):
        yield LaunchCase(name, functools.partial(w8a8_experts, rows=rows), 90)
    for name, rows, dtype in (
        ("decode", ROWS, BF16),
        ("decode", ROWS, FP8),
        ("decode", ROWS, FP32),
        # So many that their pairs outnumber the tiles.
        ("many", 60, BF16),
        ("prefill", PREFILL_ROWS, BF16),
        ("prefill", PREFILL_ROWS, FP8),
    ):
        call = functools.partial(experts, rows=rows, dtype=dtype, prefill=name == "prefill")
        yield LaunchCase(f"{name}-{dtype_name(dtype)}", call, capability_of(dtype))
    halves = functools.partial(halves_of_experts, rows=PREFILL_ROWS, is_fp8=False)
    yield LaunchCase("halves", halves, capability_of(BF16))
    for name, rows in (("halves-w8a8", ROWS), ("tall-halves-w8a8", PREFILL_ROWS)):
        yield LaunchCase(name, functools.partial(halves_of_experts, rows=rows, is_fp8=True), 90)


def moe_router_cases(capability: int) -> Iterator[LaunchCase]:
    for count, top_k in ((256, 8), (512, 10)):

        def call(device: torch.device, count: int = count, top_k: int = top_k) -> None:
            moe_router(tensor(device, ROWS, count + 1), top_k, True)

        yield LaunchCase(f"{count}-{top_k}", call)


def pages(
    device: torch.device, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    kv = tensor(device, MAX_BLOCKS, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=dtype)
    return kv, tensor(device, *kv.shape[:-1]) if dtype == FP8 else None


def attention(
    device: torch.device,
    window: int,
    heads: tuple[int, int, int],
    cache_dtype: torch.dtype,
    requests: int = 1,
) -> None:
    """heads: of queries, of keys, and the dims of each."""
    query_heads, kv_heads, dim = heads
    dtype = FP32 if cache_dtype == FP32 else BF16
    rows = requests * window
    qkv = tensor(device, rows, (2 * query_heads + 2 * kv_heads) * dim, dtype=dtype)
    own_gate = qkv[:, : 2 * query_heads * dim].view(-1, query_heads, 2, dim)[:, :, 1]
    paged_attention(
        tensor(device, rows, query_heads, dim, dtype=dtype), own_gate,
        *pages(device, kv_heads, dim, cache_dtype),
        tensor(device, requests, MAX_BLOCKS, dtype=INT32), tensor(device, rows, dtype=INT64), dim**-0.5, 0,
    )  # fmt: skip


def paged_attention_cases(capability: int) -> Iterator[LaunchCase]:
    for heads in ((24, 4, 256), (16, 2, 256), (8, 2, 256), (8, 2, 128), (4, 2, 64)):
        for dtype in (BF16, FP8, FP32):
            if dtype == FP32 and heads not in ((8, 2, 256), (4, 2, 64)):
                continue
            for name, window, requests in (
                ("verify", WINDOW, 1),
                # So many that a program may have a group of splits.
                ("grouped-verify", WINDOW, 32),
                ("prefill", PREFILL_ROWS, 1),
                ("short-prefill", 128, 1),
            ):
                label = f"{name}-{'-'.join(map(str, heads))}-{dtype_name(dtype)}"
                call = functools.partial(
                    attention, window=window, heads=heads, cache_dtype=dtype, requests=requests
                )
                yield LaunchCase(label, call, capability_of(dtype))


def rotate(device: torch.device, heads: tuple[int, int, int], cache_dtype: torch.dtype) -> None:
    query_heads, kv_heads, dim = heads
    dtype = FP32 if cache_dtype == FP32 else BF16
    empty = functools.partial(tensor, device)
    qk_norm_rope_kv_write(
        empty(ROWS, (2 * query_heads + 2 * kv_heads) * dim, dtype=dtype), empty(dim, dtype=dtype),
        empty(dim, dtype=dtype), empty(8192, dim // 4), empty(ROWS, dtype=INT64), empty(ROWS, dtype=INT64),
        *pages(device, kv_heads, dim, cache_dtype), query_heads, kv_heads, EPS,
    )  # fmt: skip


def qk_norm_rope_kv_write_cases(capability: int) -> Iterator[LaunchCase]:
    for heads in ((24, 4, 256), (8, 2, 256), (8, 2, 64)):
        for dtype in (BF16, FP8, FP32):
            label = f"{'-'.join(map(str, heads))}-{dtype_name(dtype)}"
            call = functools.partial(rotate, heads=heads, cache_dtype=dtype)
            yield LaunchCase(label, call, capability_of(dtype))


def norm(device: torch.device, kind: str, width: int, dtype: torch.dtype) -> None:
    """rms_norm ("alone"), pair_norm ("pair"), or add_rms_norm of a sum, of parts or of some of their rows."""
    empty = functools.partial(tensor, device, dtype=dtype)
    row, weight = empty(ROWS, width), empty(width)
    kept = tensor(device, 1, dtype=INT64)
    if kind == "alone":
        rms_norm(row, weight, EPS)
    elif kind == "pair":
        pair_norm(empty(VOCAB, width), tensor(device, ROWS, dtype=INT64), row, weight, weight, EPS)
    elif kind == "add-quantized":
        add_rms_norm_quantized(tensor(device, 4, ROWS, width), row, weight, EPS)
    else:
        x = row if kind == "add" else tensor(device, 4, ROWS, width)
        add_rms_norm(x, row, weight, EPS, kept if kind == "add-kept-parts" else None)


def rms_norm_cases(capability: int) -> Iterator[LaunchCase]:
    for dtype, width in ((BF16, 5120), (BF16, 2560), (BF16, 2048), (BF16, 1024), (FP32, 1024)):
        for kind in ("alone", "add", "add-parts", "add-kept-parts", "pair"):
            call = functools.partial(norm, kind=kind, width=width, dtype=dtype)
            yield LaunchCase(f"{kind}-{width}-{dtype_name(dtype)}", call)
    for width in (5120, 2048):
        call = functools.partial(norm, kind="add-quantized", width=width, dtype=BF16)
        yield LaunchCase(f"add-quantized-{width}-bf16", call, FP8_CAPABILITY)


def draw(device: torch.device, vocab: int, form: str) -> None:
    """One request's window ("window"), with masks, the draft of a cut head ("cut"), or the filters alone."""
    empty = functools.partial(tensor, device)
    tables = SamplingTables(
        temperature=empty(SLOTS),
        top_k=empty(SLOTS, dtype=INT32),
        top_p=empty(SLOTS),
        min_p=empty(SLOTS),
        seed=empty(SLOTS, dtype=INT64),
        features=empty(SLOTS, dtype=INT32),
        repetition_penalty=empty(SLOTS),
        presence_penalty=empty(SLOTS),
        frequency_penalty=empty(SLOTS),
        output_counts=empty(SLOTS, vocab, dtype=INT32),
        prompt_seen=empty(SLOTS, vocab, dtype=torch.bool),
        bias=empty(SLOTS, vocab),
        min_position=empty(SLOTS, dtype=INT64),
        stop_ids=empty(SLOTS, 64, dtype=INT64),
        bad_words=empty(SLOTS, 64, RECENT_IDS, dtype=INT64),
        bad_word_lengths=empty(SLOTS, 64, dtype=INT32),
        recent_ids=empty(SLOTS, RECENT_IDS, dtype=INT64),
    )
    rows = 1 if form == "cut" else ROWS
    where = (empty(1, 3, dtype=INT64), empty(rows, dtype=INT64), empty(1, dtype=INT32))
    column_ids = empty(32768, dtype=INT64) if form == "cut" else None
    masks = empty(rows, -(-vocab // 32), dtype=INT32) if form in ("masks", "filter") else None
    logits = empty(rows, vocab if column_ids is None else len(column_ids))
    operator = filter_logits if form == "filter" else sample
    operator(logits, *where, tables, vocab - 3, column_ids, masks)


def sample_cases(capability: int) -> Iterator[LaunchCase]:
    for form, vocab in (("window", VOCAB), ("masks", VOCAB), ("cut", VOCAB), ("filter", VOCAB)):
        yield LaunchCase(form, functools.partial(draw, vocab=vocab, form=form))
    yield LaunchCase("window-small", functools.partial(draw, vocab=1024, form="window"))


def row_logprobs_cases(capability: int) -> Iterator[LaunchCase]:
    for vocab in (VOCAB, 1024):

        def call(device: torch.device, vocab: int = vocab) -> None:
            row_logprobs(tensor(device, ROWS, vocab), tensor(device, ROWS, dtype=INT64), vocab - 3)

        yield LaunchCase(str(vocab), call)


def silu_mul_cases(capability: int) -> Iterator[LaunchCase]:
    for dtype in (BF16, FP32):

        def call(device: torch.device, dtype: torch.dtype = dtype) -> None:
            silu_mul(tensor(device, ROWS, 2 * 17408, dtype=dtype))

        yield LaunchCase(dtype_name(dtype), call)

    def quantized(device: torch.device) -> None:
        silu_mul_quantized(tensor(device, ROWS, 2 * 17408, dtype=BF16))

    yield LaunchCase("bf16-quantized", quantized, FP8_CAPABILITY)


def window(device: torch.device) -> None:
    """Reads the rows of one request and accepts them."""
    empty = functools.partial(tensor, device, dtype=INT64)
    index = empty(1, dtype=INT32)
    cursors = Cursors(empty(SLOTS), empty(SLOTS), empty(SLOTS))
    place = (WINDOW - 1, BLOCK_SIZE, MAX_BLOCKS * BLOCK_SIZE)
    read_window(index, cursors, empty(SLOTS, WINDOW - 1), empty(SLOTS, MAX_BLOCKS, dtype=INT32), *place)
    table = empty(1, MAX_BLOCKS, dtype=INT32)
    outcome = torch.empty(WINDOW, dtype=torch.uint8, device=device)
    counts = empty(SLOTS, VOCAB, dtype=INT32)
    history = History(empty(SLOTS, dtype=INT32), counts, empty(SLOTS, RECENT_IDS))
    rows = (empty(WINDOW), empty(WINDOW), outcome, index, empty(1), table)
    accept_window(*rows, cursors, history, *place)


def window_cases(capability: int) -> Iterator[LaunchCase]:
    yield LaunchCase("round", window)


CASES: dict[str, Callable[[int], Iterator[LaunchCase]]] = {
    "gdn_prefill": gdn_prefill_cases,
    "gdn_verify": gdn_verify_cases,
    "linear": linear_cases,
    "linear_w8a8": linear_w8a8_cases,
    "moe_experts": moe_experts_cases,
    "moe_router": moe_router_cases,
    "paged_attention": paged_attention_cases,
    "qk_norm_rope_kv_write": qk_norm_rope_kv_write_cases,
    "quantize_rows": quantize_rows_cases,
    "rms_norm": rms_norm_cases,
    "row_logprobs": row_logprobs_cases,
    "sample": sample_cases,
    "silu_mul": silu_mul_cases,
    "spec_conv1d": spec_conv1d_cases,
    "window": window_cases,
}


def cases(operator: str, capability: int) -> list[LaunchCase]:
    """The calls of one folder of ops/ that a GPU of that capability is asked for."""
    return [case for case in CASES[operator](capability) if capability >= case.min_capability]
