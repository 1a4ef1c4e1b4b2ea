"""`paged_attention` and `qk_norm_rope_kv_write` on a device, at the shapes of the released models."""

from __future__ import annotations

import random

import pytest
import torch

from compiled_mtp.ops.paged_attention import kernel, paged_attention, splits
from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from tests.ops.attention_cases import call, exact, make
from tests.ops.harness import check_launch, rel_l2
from tests.ops.test_qk_norm_rope_kv_write import make as make_qk

pytestmark = pytest.mark.gpu

HEADS = {"0.8b": (8, 2, 256), "4b": (16, 4, 256), "27b": (24, 4, 256), "35b": (16, 2, 256)}
SMALL = {"narrow": (4, 2, 64), "middle": (6, 2, 128), "wide group": (16, 1, 128)}
# rel-L2 against float64: rounding the result and the softmax weights to bfloat16 once each gives 2e-3.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def check_exact(args, tolerance):
    got = paged_attention.launch(*call(args))
    want = exact(*args)
    assert got.isfinite().all()
    assert rel_l2(got, want) < tolerance
    # No row's error may be hidden by the other rows.
    for row, wanted in zip(got, want, strict=True):
        if wanted.norm() > 0:
            assert rel_l2(row, wanted) < 2 * tolerance
    return got


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", [*HEADS, *SMALL])
def test_verify_against_float64(shape, fp8):
    heads = (HEADS | SMALL)[shape]
    for lengths, window in (
        ([1, 5, 64, 130, 515, 2050, 4097], 1),
        ([4, 63, 65, 129, 1025, 2051, 4099, 8193], 4),  # windows that straddle pages and splits
        ([8, 131, 2055, 32771, 33000], 8),
        ([16, 131, 2055, 32771, 33000], 16),
    ):
        args = make(lengths, window, *heads, dtype=torch.bfloat16, fp8=fp8, device="cuda", max_blocks=700)
        check_exact(args, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_block_sizes_and_first_key(block_size):
    for lengths, window in (([4, 131, 515], 4), ([515], 200)):
        args = make(lengths, window, 8, 2, 256, dtype=torch.bfloat16, block_size=block_size, device="cuda")
        args[-1] = 1
        check_exact(args, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("shape", ["0.8b", *SMALL])
def test_float32_against_float64(shape):
    heads = (HEADS | SMALL)[shape]
    for lengths, window in (([4, 131, 2051], 4), ([515], 200)):
        args = make(lengths, window, *heads, device="cuda")
        check_exact(args, TOLERANCE[torch.float32])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", ["0.8b", "27b", "35b", *SMALL])
def test_prefill_against_float64(shape, fp8):
    heads = (HEADS | SMALL)[shape]
    for lengths, window in (([19], 19), ([513], 513), ([700], 130), ([2100, 400], 65)):
        args = make(lengths, window, *heads, dtype=torch.bfloat16, fp8=fp8, device="cuda")
        check_exact(args, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("window", [4, 40])
def test_fp8_scales_far_apart(window):
    args = make([700, 90], window, 24, 4, 256, dtype=torch.bfloat16, fp8=True, device="cuda")
    g = torch.Generator("cuda").manual_seed(1)
    # Values of one token are a million times another's; keys are such that softmax is not one-hot.
    args[3][:, 1] *= 10 ** (6 * torch.rand(args[3][:, 1].shape, generator=g, device="cuda") - 3)
    args[3][:, 0] *= 0.5 + torch.rand(args[3][:, 0].shape, generator=g, device="cuda")
    check_exact(args, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("window", [3, 70])
def test_padding_and_unwritten_rows_change_no_result(window):
    args = make([70 + window], window, 24, 4, 256, dtype=torch.bfloat16, device="cuda")
    want = paged_attention.launch(*call(args))
    q, gate = (torch.cat((t, t, t)) for t in args[:2])
    table = torch.cat((args[4], args[4], torch.full_like(args[4], -1)))
    positions = torch.cat((args[5], args[5] + window, torch.zeros_like(args[5])))
    got = paged_attention.launch(*call([q, gate, *args[2:4], table, positions, *args[6:]]))
    assert torch.equal(got[:window], want)
    assert (got[2 * window :] == 0).all()
    # The same within one request: its last rows were never written.
    positions = torch.cat((args[5], args[5] + window))
    twice = [q[: 2 * window], gate[: 2 * window], *args[2:5], positions, *args[6:]]
    got = paged_attention.launch(*call(twice))
    if 2 * window <= 16:
        assert torch.equal(got[:window], want)
    else:
        assert rel_l2(got[:window], want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize("shape", ["0.8b", "27b", "35b", "middle", "wide group"])
def test_bits_of_a_row_do_not_depend_on_other_rows(shape, dtype):
    heads = (HEADS | SMALL)[shape]
    lengths = [16, 64, 66, 127, 129, 130, 133, 300, 515] * 3 + [1027, 1153, 2055, 4100, 4353, 8195, 33001]
    x = torch.float32 if dtype == "fp32" else torch.bfloat16
    most = 16
    args = make(lengths, most, *heads, dtype=x, fp8=dtype == "fp8", device="cuda")
    q, gate, kv, scale, table, positions, softmax_scale, first = args
    full = paged_attention.launch(*args)
    rows = torch.arange(len(lengths) * most, device="cuda").view(-1, most)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    for window in range(1, most + 1):
        for requests in ([order[window]], order[:3], order[5:21], order):
            for begin in {0, most - window}:
                pick = rows[requests, begin : begin + window].flatten()
                wide = torch.nn.functional.pad(table[requests], (0, 37 * window), value=-1)
                got = paged_attention.launch(
                    q[pick], gate[pick], kv, scale, wide, positions[pick], softmax_scale, first
                )
                assert torch.equal(got, full[pick]), (window, requests, begin)


@pytest.mark.parametrize("fp8", [False, True])
def test_prefixes_have_the_bits_of_splits(monkeypatch, fp8):
    """For requests of one length and of many lengths: 33 have tiles of 16 rows, 48 tiles of 32; with 256 each
    program that combines takes many rows."""
    rng = random.Random(0)
    for requests in (33, 48, 256):
        for lengths in ([600] * requests, [rng.randint(4, 400_000 // requests) for _ in range(requests)]):
            args = make(lengths, 4, *HEADS["27b"], dtype=torch.bfloat16, fp8=fp8, device="cuda")
            found = []
            for most in (1, 1 << 30):
                monkeypatch.setattr(splits, "PREFIXED_ITEMS", most)
                monkeypatch.setattr(kernel, "PREFIXED_ITEMS", most)
                found.append(paged_attention.launch(*args))
            assert torch.equal(*found), (requests, lengths[:4])


def test_strided_inputs_and_poisoned_memory():
    args = make([70, 131], 4, 24, 4, 256, dtype=torch.bfloat16, device="cuda")
    packed = torch.randn(8, (2 * 24 + 8) * 256, device="cuda", dtype=torch.bfloat16)
    args[1] = packed[:, : 48 * 256].view(8, 24, 512)[:, :, 256:]
    args[2] = torch.stack((args[2], torch.full_like(args[2], torch.nan)), 1)[
        :, 0
    ]  # a layer of a larger cache
    check_launch(paged_attention, args, rtol=8e-3, atol=2e-3)
    check_launch(paged_attention, call(make([90], 50, 8, 2, 256, device="cuda")), rtol=1e-5, atol=2e-6)


def test_pages_beyond_two_to_the_31_elements():
    block_elements = 2 * 2 * 64 * 256
    num_blocks = 2**31 // block_elements + 40
    kv = torch.empty((num_blocks, 2, 2, 64, 256), dtype=torch.bfloat16, device="cuda")
    args = make([500], 4, 8, 2, 256, dtype=torch.bfloat16, device="cuda")
    small, table = args[2], args[4]
    far = num_blocks - small.shape[0]
    kv[far:] = small
    want = paged_attention.launch(*args)
    got = paged_attention.launch(*args[:2], kv, None, torch.where(table >= 0, table + far, -1), *args[5:])
    assert torch.equal(got, want)


@pytest.mark.parametrize("fp8", [False, True])
def test_graph_replays_with_growing_positions(fp8):
    hq, hkv, hd, window = 24, 4, 256, 4
    lengths = [600, 131]
    args = make(lengths, window, hq, hkv, hd, dtype=torch.bfloat16, fp8=fp8, device="cuda", max_blocks=2048)
    steps = [[window, 7], [64, 70], [130, 129], [385, 131], [600, 131]]
    positions = args[5]

    def place(ends):
        for b, end in enumerate(ends):
            positions[b * window : (b + 1) * window] = torch.arange(end - window, end)

    paged_attention.launch(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention.launch(*args)
    for ends in steps:
        place(ends)
        graph.replay()
        torch.cuda.synchronize()
        got = out.clone()
        assert torch.equal(got, paged_attention.launch(*args))
        assert rel_l2(got, exact(*args)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("fp8", [False, True])
def test_kernels_that_start_early_wait_for_what_they_read(fp8):
    layers, window, lengths = 6, 4, [70, 515]
    device_lengths = torch.tensor(lengths, device="cuda")
    calls = []
    for layer in range(layers):
        args = make(lengths, window, 24, 4, 256, dtype=torch.bfloat16, fp8=fp8, device="cuda", seed=layer)
        positions, table = args[5], args[4]
        request = torch.arange(len(lengths), device="cuda").repeat_interleave(window)
        slots = table[request, positions // 64].long() * 64 + positions % 64
        qkv = torch.randn(len(positions), (2 * 24 + 8) * 256, device="cuda").bfloat16()
        weights = [torch.randn(256, device="cuda").bfloat16() for _ in range(2)]
        calls.append((args, qkv, weights, torch.rand(1024, 64, device="cuda"), slots))

    def run(positions_of):
        outs, carried = [], torch.zeros_like(calls[0][1])
        for args, qkv, weights, cos_sin, slots in calls:
            positions = positions_of()
            mixed = qkv + carried
            q = qk_norm_rope_kv_write(mixed, *weights, cos_sin, positions, slots, *args[2:4], 24, 4, 1e-6)
            gate = mixed[:, : 48 * 256].view(-1, 24, 512)[:, :, 256:]
            outs.append(paged_attention.launch(q, gate, *args[2:5], positions, *args[6:]))
            # The next layer reads the result of this one.
            carried = torch.nn.functional.pad(outs[-1], (0, mixed.shape[1] - outs[-1].shape[1]))
        return outs

    def index():
        steps = torch.arange(window, device="cuda") - window
        return (device_lengths[:, None] + steps).flatten()

    def synchronized():
        torch.cuda.synchronize()
        return index()

    want = run(synchronized)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(index)
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted in zip(outs, want, strict=True):
            assert torch.equal(got, wanted)


def test_compiles_with_cuda_graphs():
    compiled = torch.compile(paged_attention, fullgraph=True, mode="reduce-overhead")
    for lengths in ([70, 5], [300]):
        args = make(lengths, 4, 8, 2, 256, dtype=torch.bfloat16, device="cuda")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*args), paged_attention(*args))


def test_registrations():
    args = make([70, 5], 4, 8, 2, 256, dtype=torch.bfloat16, device="cuda")
    args[2] = args[2].nan_to_num()
    torch.library.opcheck(torch.ops.compiled_mtp.paged_attention.default, (*args, None, None))
    args = make_qk(5, 8, 2, 256, dtype=torch.bfloat16, device="cuda")
    args[6].zero_()
    torch.library.opcheck(torch.ops.compiled_mtp.qk_norm_rope_kv_write.default, (*args, 0, 0))


@pytest.mark.parametrize("shape", [*HEADS, *SMALL])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_qk_norm_rope_kv_write(shape, dtype):
    x = torch.float32 if dtype == "fp32" else torch.bfloat16
    tolerance = {"fp32": 2e-6, "bf16": 2**-7, "fp8": 2**-3}[dtype]
    for rows in (1, 4, 33, 300):
        args = make_qk(rows, *(HEADS | SMALL)[shape], dtype=x, fp8=dtype == "fp8", device="cuda")
        check_launch(qk_norm_rope_kv_write, args, rtol=tolerance, atol=2e-6, mutated=(6, 7))


@pytest.mark.parametrize("fp8", [False, True])
def test_bits_of_a_written_row_do_not_depend_on_other_rows(fp8):
    def run(rows):
        args = make_qk(256, 24, 4, 256, dtype=torch.bfloat16, fp8=fp8, device="cuda")
        for i in (0, 4, 5):
            args[i] = args[i][rows]
        q = qk_norm_rope_kv_write(*args)
        slots = args[5].clamp(min=0)
        stored = args[6].view(torch.uint8 if fp8 else torch.int16)[slots // 16, :, :, slots % 16]
        stored[args[5] < 0] = 0
        return q, stored

    full_q, full_kv = run(torch.arange(256, device="cuda"))
    for rows in ([5], [7, 3, 200], list(range(255, -1, -1)), list(range(64))):
        q, kv = run(torch.tensor(rows, device="cuda"))
        assert torch.equal(q, full_q[rows])
        assert torch.equal(kv, full_kv[rows])
