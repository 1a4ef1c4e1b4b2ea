"""linear on the device: exact enough at real shapes, the same bits for every row count, safe in graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.k_splits import add_tree, part_counts
from compiled_mtp.ops.linear import count_partials, linear, linear_partials, linear_side, linear_silu_mul
from compiled_mtp.ops.linear.config import linear_config, narrow_config, read_table
from compiled_mtp.ops.rms_norm import add_rms_norm
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops.harness import check_launch, check_row_invariance, rel_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# (N, K) of 0.8B, 4B, 27B and 35B-A3B projections, of a router, and of no model.
BF16_SHAPES = [
    (8224, 1024),
    (1024, 3584),
    (12352, 2560),
    (2560, 4096),
    (2560, 9216),
    (16480, 5120),
    (5120, 6144),
    (5120, 17408),
    (34816, 5120),
    (2048, 4096),
    (257, 2048),
    (100, 72),
    (333, 1001),
]
FP8_SHAPES = [(1024, 2048), (2560, 9216), (5120, 6144), (34816, 5120), (300, 200)]
# Row counts of persistent programs beyond 256: a row tile of 128 begins, is full, or overflows.
MANY_ROWS = (257, 384, 385, 511, 512, 640, 1000, 1024)


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make(rows: int, n: int, k: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return x as a strided view between NaN, a weight, and its scales."""
    wide = torch.full((rows, k + 16), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, 8 : 8 + k] = torch.randn(rows, k, device="cuda")
    weight = torch.randn(n, k, device="cuda")
    if not fp8:
        return wide[:, 8 : 8 + k], (weight * k**-0.5).bfloat16(), None
    scale = torch.rand(-(-n // 128), -(-k // 128), device="cuda") * 0.01 + 0.001
    return wide[:, 8 : 8 + k], (weight * 40).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("rows", [1, 4, 17, 64, 200])
@pytest.mark.parametrize(
    "n, k, fp8", [(*shape, False) for shape in BF16_SHAPES] + [(*shape, True) for shape in FP8_SHAPES]
)
def test_as_near_to_float64_as_cublas(rows: int, n: int, k: int, fp8: bool) -> None:
    many, weight, scale = make(200, n, k, fp8)
    x = many[:rows]
    values = weight.double() if scale is None else dequantize(weight, scale).double()
    exact = x.double() @ values.T
    # The error of a product on tensor cores: without scales, which cuBLAS does not take, and on many rows,
    # since for few rows cuBLAS cuts K into more splits.
    plain = weight.bfloat16()
    plain_exact = many.double() @ plain.double().T
    cublas = rel_l2(torch.mm(many, plain.T, out_dtype=torch.float32), plain_exact)
    for prefill in (False, True):
        y = linear(x, weight, scale, False, prefill)
        assert rel_l2(y, exact) < 2 * rel_l2(exact.bfloat16(), exact)
        error = rel_l2(linear(x, weight, scale, True, prefill), exact)
        # A prompt's columns are one chain, like cuBLAS's if the rows fill the processors. The tensor cores of
        # sm_90 truncate its sum after every 16 columns: by half a unit of 24 bits on average, to one side.
        budget = max(2 * cublas, 1e-6, prefill * k / 16 * 2**-25)
        assert error < budget, f"{error:.2e} against cuBLAS's {cublas:.2e} and a budget of {budget:.2e}"


def test_fp8_values_are_exact() -> None:
    """Every finite e4m3 value, including subnormal ones, times one: the conversion does not round."""
    bits = torch.arange(256, dtype=torch.uint8, device="cuda")
    bits[[127, 255]] = 0  # the two NaN
    weight = bits.view(torch.float8_e4m3fn)[None].expand(256, 256).contiguous()
    for rows in (1, 40):
        x = torch.eye(256, device="cuda").bfloat16()
        y = linear(x[:rows], weight, torch.ones(2, 2, device="cuda"), True)
        assert torch.equal(y, weight.float().T[:rows].contiguous())


@pytest.mark.parametrize(
    "n, k, fp8", [(*shape, False) for shape in BF16_SHAPES] + [(*shape, True) for shape in FP8_SHAPES]
)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(n: int, k: int, fp8: bool) -> None:
    x, weight, scale = make(1024, n, k, fp8)
    check_row_invariance(lambda m: linear(x[:m], weight, scale), [*range(1, 257), *MANY_ROWS], 1024)
    shuffled = torch.randperm(37, device="cuda")
    assert torch.equal(linear(x[:37][shuffled], weight, scale), linear(x[:37], weight, scale)[shuffled])


@pytest.mark.parametrize(
    "n, k, entry",
    [
        (7168, 1024, [32, 256, 4, 2, 1, 4, 0]),
        (7168, 1024, [16, 256, 4, 2, 1, 4, 0]),
        (2560, 4096, [16, 128, 2, 2, 8, 4, 0]),
        (2560, 4096, [32, 512, 8, 2, 4, 2, 0]),
        (9216, 2048, [32, 256, 8, 2, 1, 8, 0]),
    ],
)
def test_one_step_has_the_bits_of_every_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, n: int, k: int, entry: list[int]
) -> None:
    """Few rows hold their weights in registers, more rows run a loop: the same K splits, the same sums."""
    linear_config.cache_clear()
    monkeypatch.setitem(read_table()["sm_90"], f"{n}x{k} bf16", entry)
    assert narrow_config("sm_90", n, k, torch.bfloat16).is_one_step(k)
    x, weight, _ = make(512, n, k, False)
    check_row_invariance(lambda m: linear(x[:m], weight, None), [*range(1, 257), 384, 511], 512)
    exact = x.double() @ weight.double().T
    assert rel_l2(linear(x, weight, None), exact) < 2 * rel_l2(exact.bfloat16(), exact)
    linear_config.cache_clear()


@pytest.mark.parametrize(
    "n, k, fp8",
    [(7168, 1024, False), (18432, 2560, False), (34816, 5120, False), (34816, 5120, True), (88, 72, False)],
)
def test_gated_has_the_bits_of_one_after_the_other(n: int, k: int, fp8: bool) -> None:
    x, weight, scale = make(1024, n, k, fp8)
    for rows in (1, 4, 16, 17, 32, 33, 64, 65, 128, 129, 257, 512, 1024):
        apart = silu_mul(linear(x[:rows], weight, scale))
        assert torch.equal(linear_silu_mul(x[:rows], weight, scale), apart), f"{rows} rows"
    check_row_invariance(lambda m: linear_silu_mul(x[:m], weight, scale), [*range(1, 257), *MANY_ROWS], 1024)


@pytest.mark.parametrize(
    "n, k, fp8",
    [
        (1024, 3584, False),
        (2560, 9216, False),
        (5120, 17408, False),
        (5120, 6144, False),
        (2048, 4096, False),
        (2560, 9216, True),
        (1024, 3584, True),
        (4096, 12288, False),
        (333, 1001, False),
    ],
)
def test_programs_have_the_same_bits(n: int, k: int, fp8: bool) -> None:
    """1, 2, 4 and 8 programs and the norm add the K splits, for every number of rows."""
    x, weight, scale = make(1024, n, k, fp8)
    residual = torch.randn(1024, n, device="cuda").bfloat16()
    factor = torch.randn(n, device="cuda").bfloat16()
    assert {count_partials(weight, rows) for rows in (1, 16, 17, 256)} <= set(part_counts(k, k))
    wanted = add_rms_norm(linear_partials(x, weight, scale, 1), residual, factor, 1e-6)
    exact = x.double() @ (weight.double() if scale is None else dequantize(weight, scale).double()).T
    assert rel_l2(linear_partials(x, weight, scale, 1)[0], exact) < 2 * rel_l2(exact.bfloat16(), exact)
    for count in part_counts(k, k):
        for rows in (*range(1, 257), *MANY_ROWS):
            parts = linear_partials(x[:rows], weight, scale, count)
            got = add_rms_norm(parts, residual[:rows], factor, 1e-6)
            same = all(torch.equal(a, b[:rows]) for a, b in zip(got, wanted, strict=True))
            assert same, f"{rows} rows, {count} programs"


# The head, 27B's products, and some of smaller models; whole weights, and a shard of one.
@pytest.mark.parametrize(
    "kind, n, k",
    [
        ("logits", 248320, 5120),
        ("product", 16480, 5120),
        ("product", 14336, 5120),
        ("product", 12352, 2560),
        ("product", 8224, 1024),
        ("gated", 34816, 5120),
        ("gated", 18432, 2560),
        ("gated", 4352, 5120),
        ("parts", 5120, 17408),
        ("parts", 5120, 6144),
        ("parts", 2560, 9216),
        ("parts", 1024, 3584),
        ("shard", 5120, 2176),
    ],
)
def test_descriptors_change_no_bit(kind: str, n: int, k: int) -> None:
    """Many rows come by the copy engine if they begin at multiples of 16 bytes.

    For any number of rows the bits are those without it.
    """
    most = 1024 if n < 100000 else 256
    x, weight, _ = make(most, n, k, False)
    unaligned = torch.empty(most, k + 1, dtype=x.dtype, device="cuda")[:, 1:].copy_(x)
    most_parts = count_partials(weight, 256)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "logits": lambda rows: linear(rows, weight, None, True),
        "product": lambda rows: linear(rows, weight),
        "gated": lambda rows: linear_silu_mul(rows, weight),
        "parts": lambda rows: linear_partials(rows, weight, None, most_parts).transpose(0, 1),
        "shard": lambda rows: linear_partials(rows, weight, None, 1, n, 8 * k)[0],
    }
    call = calls[kind]
    wanted = call(unaligned)
    for rows in (*range(1, 257), *MANY_ROWS) if n < 100000 else (1, 16, 17, 64, 65, 128, 129, 256):
        assert torch.equal(call(x[:rows]), wanted[:rows]), f"{rows} rows"


@pytest.mark.parametrize("n, k", [(96, 5120), (64, 2048), (40, 1000)])
def test_a_side_product(n: int, k: int) -> None:
    """Right while the product before it still runs; a row's bits do not depend on other rows."""
    x, weight, _ = make(256, n, k, False)
    wide = torch.randn(16384, k, device="cuda").bfloat16()
    exact = x.double() @ weight.double().T
    linear(x, wide)
    y = linear_side(x, weight)
    assert rel_l2(y, exact) < 2 * rel_l2(exact.bfloat16(), exact)
    check_row_invariance(lambda m: linear_side(x[:m], weight), range(1, 257), 256)
    assert torch.equal(linear_side(x, weight[16:]), y[:, 16:])


@pytest.mark.parametrize("n, k, fp8", [(5120, 17408, False), (5120, 6144, True)])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_have_the_bits_of_the_whole(n: int, k: int, fp8: bool, shards: int) -> None:
    """A device with some of the columns gives its subtree of the K splits' sum."""
    x, weight, scale = make(100, n, k, fp8)
    length = k // shards
    for rows in (1, 4, 33, 64, 100):
        parts = []
        for first in range(0, k, length):
            columns = slice(first, first + length)
            shard_scale = None if scale is None else scale[:, first // 128 : (first + length) // 128]
            count = max(part_counts(length, k))
            shard = linear_partials(x[:rows, columns], weight[:, columns], shard_scale, count, n, k)
            parts.append(add_tree(shard.float()))
        whole = linear_partials(x[:rows], weight, scale, 8)
        assert torch.equal(add_tree(parts).bfloat16(), add_tree(whole).bfloat16()), f"{rows} rows"


@pytest.mark.parametrize("n, k", [(34816, 5120), (5120, 17408), (2560, 2560), (257, 2048), (333, 1001)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("out_float32", [False, True])
def test_bits_of_a_prompt_do_not_depend_on_its_chunk(n: int, k: int, fp8: bool, out_float32: bool) -> None:
    """From one row to a chunk, for any tile and with or without descriptors."""
    x, weight, scale = make(2048, n, k, fp8)
    y = linear(x, weight, scale, out_float32, True)
    for rows in (1, 7, 63, 64, 65, 128, 129, 200, 256, 512, 1000, 1024):
        assert torch.equal(linear(x[:rows], weight, scale, out_float32, True), y[:rows]), rows
    for first in (64, 512, 1088):
        assert torch.equal(
            linear(x[first : first + 512], weight, scale, out_float32, True), y[first : first + 512]
        )
    unaligned = torch.empty(300, k + 1, dtype=x.dtype, device="cuda")[:, 1:].copy_(x[:300])
    assert torch.equal(linear(unaligned, weight, scale, out_float32, True), y[:300])


def test_scales_beyond_k_are_not_read() -> None:
    """Three blocks of K in two chains; NaN comes after the scales."""
    x, weight, scale = make(5, 256, 384, True)
    assert scale is not None
    guarded = torch.full((64,), float("nan"), device="cuda")
    guarded[: scale.numel()] = scale.flatten()
    scale = guarded[: scale.numel()].view(scale.shape)
    count = count_partials(weight, 5)
    for rows in (1, 5):
        assert linear(x[:rows], weight, scale).isfinite().all()
        assert linear_silu_mul(x[:rows], weight, scale).isfinite().all()
        assert linear_partials(x[:rows], weight, scale, count).isfinite().all()


@pytest.mark.parametrize("n, k", [(1024, 2048), (333, 1001)])
def test_float32(n: int, k: int) -> None:
    x, weight = torch.randn(70, k, device="cuda"), torch.randn(n, k, device="cuda")
    error, cublas = (rel_l2(y, x.double() @ weight.double().T) for y in (linear(x, weight), x @ weight.T))
    assert error < 2 * cublas, f"{error:.2e} against cuBLAS's {cublas:.2e}"
    check_row_invariance(lambda m: linear(x[:m], weight), range(1, 70), 70)


@pytest.mark.parametrize("n, k, fp8", [(2560, 9216, False), (333, 1001, False), (1024, 2048, True)])
def test_writes_all_of_its_output_and_nothing_else(n: int, k: int, fp8: bool) -> None:
    x, weight, scale = make(5, n, k, fp8)
    check_launch(linear, (x, weight, scale, False, False), rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [4, 70])
def test_chain_in_a_graph_equals_one_kernel_at_a_time(rows: int) -> None:
    """Dependent launches overlap neighbours: a missing wait would change bits.

    A graph keeps the descriptors with which it was captured.
    """
    h, wide = 1024, 3584
    gate_up = (torch.randn(2 * wide, h, device="cuda") * h**-0.5).bfloat16()
    down = (torch.randn(h, wide, device="cuda") * wide**-0.5).bfloat16()
    norm = torch.randn(h, device="cuda").bfloat16() * 0.1
    start = torch.randn(rows, h, device="cuda").bfloat16()
    x = start.clone()

    def chain(synchronize: bool) -> torch.Tensor:
        y, residual = x, x
        for _ in range(20):
            for step in ("norm", "up", "act", "down"):
                if step == "norm":
                    y, residual = add_rms_norm(y, residual, norm, 1e-6)
                else:
                    y = {
                        "up": lambda v: linear(v, gate_up),
                        "act": silu_mul,
                        "down": lambda v: linear(v, down),
                    }[step](y)
                if synchronize:
                    torch.cuda.synchronize()
        return y

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(False)
    for seed in range(20):
        x.copy_(start * (1 + seed / 8))
        graph.replay()
        assert torch.equal(y, chain(True)), f"replay {seed}"
