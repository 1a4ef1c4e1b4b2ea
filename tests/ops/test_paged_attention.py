"""`paged_attention`: the reference against float64, its masks, and row invariance."""

from __future__ import annotations

import math
import random

import pytest
import torch

from compiled_mtp.ops.paged_attention import paged_attention, splits
from tests.ops.attention_cases import call, exact, make
from tests.ops.harness import check_equal, check_launch


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (8, 2), (6, 1), (8, 1), (3, 1)])
def test_reference_matches_float64(hq, hkv, block_size):
    args = make([131, 64, 1 + 3, 200], 3, hq, hkv, 64, block_size=block_size)
    torch.testing.assert_close(paged_attention(*args).double(), exact(*args), rtol=0, atol=2e-6)


def test_reference_matches_sdpa_on_a_prefill_chunk():
    args = make([300], 172, 8, 2, 128)
    q, gate, kv, _, table, positions, scale, _ = args
    pages = kv[table[0, :5].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :300]
    mask = torch.arange(300) <= positions.unsqueeze(1)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        pages[0][None],
        pages[1][None],
        attn_mask=mask[None],
        scale=scale,
        enable_gqa=True,
    )[0]
    want = (want.transpose(0, 1) * torch.sigmoid(gate)).flatten(1)
    torch.testing.assert_close(paged_attention(*call(args)), want, rtol=0, atol=2e-6)


def test_fp8_pages_are_read_with_their_scales():
    args = make([70, 5], 2, 4, 2, 64, fp8=True)
    args[3][args[4][0, 0].long(), :, 0, 3] *= 1e4  # one large token
    want = exact(*args)
    error = (paged_attention(*args).double() - want).abs().max() / want.abs().max()
    assert error < 1e-6


def test_first_key_hides_earlier_keys_and_rows_before_it_are_zero():
    args = make([70, 5], 4, 4, 2, 64)
    args[-1] = 3
    out = paged_attention(*args)
    torch.testing.assert_close(out.double(), exact(*args), rtol=0, atol=2e-6)
    assert (args[5][4:] == torch.tensor([1, 2, 3, 4])).all()
    assert (out[4:6] == 0).all()
    assert (out[6:] != 0).any()
    args[-1] = 500
    assert (paged_attention(*args) == 0).all()


def test_padding_requests_and_unwritten_rows_change_no_result():
    args = make([70, 66], 4, 4, 2, 64)
    alone = paged_attention(*args)
    table = torch.cat((args[4], torch.full_like(args[4][:1], -1)))
    positions = torch.cat((args[5], torch.zeros(4, dtype=torch.int64)))
    q, gate = (torch.cat((t, torch.full_like(t[:4], 7.0))) for t in args[:2])
    both = paged_attention(q, gate, *args[2:4], table, positions, *args[6:])
    assert torch.equal(both[:8], alone)
    assert (both[8:] == 0).all()
    # Rows after the end of a chunk: their positions are in the page, but their keys were never written.
    args = make([70], 4, 4, 2, 64)
    want = paged_attention(*args)
    q, gate = (torch.cat((t, t)) for t in args[:2])
    positions = torch.cat((args[5], torch.arange(70, 74)))
    got = paged_attention(q, gate, *args[2:5], positions, *args[6:])
    assert torch.equal(got[:4], want)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (8, 2), (6, 1), (8, 1), (3, 1)])
def test_bits_of_a_row_do_not_depend_on_other_rows(hq, hkv, dtype, threads):
    lengths = [131, 66, 17, 257, 64]
    window = 16
    args = make(lengths, window, hq, hkv, 64, dtype=dtype)
    q, gate, kv, _, table, positions, scale, first = args
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        full = paged_attention(*args).unflatten(0, (len(lengths), window))
        torch.set_num_threads(threads)
        rows = torch.arange(len(lengths) * window).view(len(lengths), window)
        for requests in ([3, 0, 1, 4, 2], [2], [1, 3]):
            for part in (slice(0, 16), slice(0, 8), slice(2, 5), slice(7, 8), slice(0, 1)):
                pick = rows[requests, part].flatten()
                got = paged_attention(
                    q[pick], gate[pick], kv, None, table[requests], positions[pick], scale, first
                )
                assert torch.equal(got, full[requests, part].flatten(0, 1))
        # A wide block table, and one request as a prompt chunk.
        wide = torch.nn.functional.pad(table, (0, 40), value=-1)
        assert torch.equal(paged_attention(q, gate, kv, None, wide, *args[5:]), full.flatten(0, 1))
    finally:
        torch.set_num_threads(before)


def test_a_chunk_of_rows_gives_the_bits_of_its_windows():
    args = make([600], 600, 8, 2, 64)
    q, gate, kv, _, table, positions, scale, first = args
    chunk = paged_attention(*call(args))
    for begin, end in ((0, 1), (63, 67), (500, 508), (560, 576), (599, 600)):
        part = slice(begin, end)
        got = paged_attention(q[part], gate[part], kv, None, table, positions[part], scale, first)
        assert torch.equal(got, chunk[part])


@pytest.mark.parametrize("fp8", [False, True])
def test_opcheck(fp8):
    args = make([70, 5], 2, 4, 2, 64, fp8=fp8)
    # opcheck's schema test compares tensors by arithmetic that torch lacks for float8 on the CPU.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    overload = torch.ops.compiled_mtp.paged_attention.default
    torch.library.opcheck(overload, (*args, None, None), test_utils=tests if fp8 else "ALL")


def test_traces_as_one_graph_at_two_sizes():
    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager", dynamic=False)
    for lengths in ([70, 5], [9]):
        args = make(lengths, 2, 4, 2, 64)
        assert torch.equal(compiled(*args), paged_attention(*args))


def with_scale(args):
    args[3] = torch.ones(args[2].shape[:4])


def bad(index, value):
    def change(args):
        args[index] = value(args[index])

    return change


def widen(args, window):
    args[:] = make([70, 50], window, 4, 2, 64)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q must have shape", bad(0, lambda t: t[0])),
        ("q must have dtype", bad(0, lambda t: t.half())),
        ("q must have a last dimension of stride 1", bad(0, lambda t: t.transpose(1, 2).contiguous().mT)),
        ("gate must have shape", bad(1, lambda t: t[:2])),
        ("gate must have dtype", bad(1, lambda t: t.bfloat16())),
        ("kv must have shape", bad(2, lambda t: t[:, :1])),
        ("kv must have dtype", bad(2, lambda t: t.bfloat16())),
        ("query heads must be a multiple", bad(2, lambda t: t[:, :, [0, 1, 1]])),
        ("block_size must be a multiple of 16", bad(2, lambda t: t[:, :, :, :24])),
        ("kv must have dtype", with_scale),
        ("block_table must have dtype", bad(4, lambda t: t.long())),
        ("rows must be a multiple", bad(4, lambda t: t[[0, 0, 0]])),
        ("positions must have shape", bad(5, lambda t: t[:3])),
        ("positions must have dtype", bad(5, lambda t: t.int())),
        ("first_key must be at least 0", bad(7, lambda t: -1)),
        ("a window must have at most 16 rows, got 17; pass first_row", lambda args: widen(args, 17)),
    ],
)
def test_errors_name_the_argument(message, change):
    args = make([70, 5], 2, 4, 2, 64)
    change(args)
    with pytest.raises(ValueError, match=message):
        paged_attention(*args)


def test_head_dim_outside_the_kernels_is_refused():
    args = make([70], 2, 4, 2, 64)
    args[0], args[1], args[2] = (t[..., :48] for t in args[:3])
    with pytest.raises(ValueError, match="head_dim must be"):
        paged_attention(*args)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("first_key", [0, 70])
def test_the_cpu_computes_the_specification(fp8, first_key):
    args = (*make([130, 5, 64], 3, 4, 2, 64, fp8=fp8)[:7], first_key)
    check_equal(paged_attention, paged_attention.reference, args, rtol=1e-5, atol=2e-6)


def test_scores_far_apart_do_not_overflow():
    args = make([130], 2, 4, 2, 64)
    args[0] = args[0] * 1e4
    out = paged_attention(*args)
    assert out.isfinite().all()
    want = exact(*args)
    assert math.isclose(float(out.double().norm()), float(want.norm()), rel_tol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "window", "heads", "dtype", "fp8", "block_size", "first_key"),
    [
        ([131, 20], 3, (4, 2), torch.float32, False, 16, 0),
        ([64], 1, (3, 1), torch.float32, False, 64, 1),
        ([131, 20, 66], 4, (6, 1), torch.bfloat16, False, 64, 1),
        ([258, 9], 8, (10, 1), torch.bfloat16, False, 48, 0),
        ([131, 5], 5, (6, 1), torch.bfloat16, True, 64, 0),
        ([32900], 2, (1, 1), torch.bfloat16, False, 64, 0),  # splits of every size
        ([20], 2, (2, 1), torch.float32, False, 64, 5000),  # no row sees a key
        ([50, 70], 16, (4, 2), torch.float32, False, 16, 3),
        ([131], 15, (6, 1), torch.bfloat16, False, 64, 0),
        ([50], 20, (4, 2), torch.float32, False, 16, 3),
        ([150], 140, (2, 1), torch.bfloat16, False, 64, 0),
        ([150, 70], 70, (2, 1), torch.bfloat16, True, 48, 1),
    ],
)
def test_kernels_in_interpreter(interpreter, lengths, window, heads, dtype, fp8, block_size, first_key):
    args = make(lengths, window, *heads, 64, dtype=dtype, block_size=block_size, fp8=fp8)
    args[-1] = first_key
    # A weight rounded to bfloat16 has a relative error of 2^-9, and values reach 4.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 4e-3}
    check_launch(paged_attention, call(args), **tolerance)


def test_kernel_keeps_padding_requests_and_unwritten_rows_separate(interpreter):
    for window in (2, 8):
        args = make([70], window, 2, 1, 64)
        want = paged_attention.launch(*args)
        # A padding request, and rows whose keys in the last page were never written.
        q, gate = (torch.cat((t, t, t, t)) for t in args[:2])
        table = torch.cat((args[4], torch.full_like(args[4], -1)))
        after = torch.arange(70, 70 + window)
        padding = torch.zeros(2 * window, dtype=torch.int64)
        positions = torch.cat((args[5], after, padding))
        got = paged_attention.launch(*call([q, gate, *args[2:4], table, positions, *args[6:]]))
        assert torch.equal(got[:window], want)
        assert (got[2 * window :] == 0).all()


@pytest.mark.parametrize(
    ("lengths", "window", "heads", "fp8", "first_key"),
    [
        ([700, 515, 130, 66, 9], 4, (4, 2), False, 0),
        ([515, 1030], 3, (3, 1), True, 1),
        ([300], 5, (6, 1), False, 70),
        ([4, 1300, 70, 90], 2, (10, 1), False, 0),  # one long request: it has partials after its prefix
        ([4300, 10], 1, (1, 1), False, 2000),
        ([40, 50], 3, (2, 1), False, 5000),  # no row sees a key
    ],
)
def test_prefixes_have_the_bits_of_splits(interpreter, monkeypatch, lengths, window, heads, fp8, first_key):
    """Splits are folded in a program's registers or by the kernel that combines partial results."""
    from compiled_mtp.ops.paged_attention import kernel

    args = make(lengths, window, *heads, 64, dtype=torch.bfloat16, fp8=fp8)
    args[-1] = first_key
    found = []
    for most in (1 << 30, 1):
        monkeypatch.setattr(splits, "PREFIXED_ITEMS", most)
        monkeypatch.setattr(kernel, "PREFIXED_ITEMS", most)
        found.append(paged_attention.launch(*args))
    assert torch.equal(*found)
    # The counter of items is zero again.
    assert torch.equal(paged_attention.launch(*args), found[1])


def test_tiles_of_sixteen_rows_have_the_bits_of_those_of_thirty_two(interpreter, monkeypatch):
    """Six query heads and four rows; two requests of one kv head, of which no program takes both."""
    from compiled_mtp.ops.paged_attention import kernel

    args = make([130, 20], 4, 6, 1, 256, dtype=torch.bfloat16)
    found = []
    for most in (1 << 30, 1):
        monkeypatch.setattr(splits, "PREFIXED_ITEMS", most)
        monkeypatch.setattr(kernel, "PREFIXED_ITEMS", most)
        found.append(paged_attention.launch(*args))
    assert torch.equal(*found)


def test_the_rows_of_a_tile():
    from compiled_mtp.ops.paged_attention.kernel import verify_configuration

    def rows(group_rows, pairs, has_scale=False):
        return verify_configuration(torch.bfloat16, has_scale, 256, group_rows, pairs, 132).BM

    assert [rows(24, pairs) for pairs in (1, 63, 64, 67, 128, 132, 133, 256)] == [
        32,
        32,
        32,
        16,
        16,
        16,
        32,
        32,
    ]
    assert [rows(48, pairs) for pairs in (64, 88, 89)] == [16, 16, 32]
    assert rows(24, 128, has_scale=True) == 32
    assert rows(16, 512) == 16


def test_splits_cover_every_key_once(interpreter):
    from compiled_mtp.ops.paged_attention.splits import count_splits

    sizes = [64] * 16 + [128] * 24 + [256] * 112 + [512] * 20
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for keys in (1, 64, 65, 1023, 1024, 1025, 4096, 4097, 8192, 8193, 32768, 32769, 40000):
        assert count_splits(keys) == 1 + sum(end < keys for end in ends)


def prefix_end(lengths, heads, programs):
    """`find_prefix` in Python: the number of splits of a prefix; `heads` items take a request's keys."""
    total, items, longest = sum(lengths) * heads, len(lengths) * heads, max(lengths)
    share, fair = total // programs, 2 * total // (programs + items)
    most, whole = (fair, fair + 224) if items <= programs else (share // 2, share + share // 4)
    if longest <= whole:
        return splits.count_splits(longest)
    return max(1, splits.count_splits(1 + most) - 1)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("most_keys", [64, 900, 1025, 5000, 40000, 262144])
def test_the_buffer_holds_the_partials_of_any_lengths(kv_heads, most_keys):
    """Of requests of any lengths, whatever number of programs shares them."""
    rng = random.Random(most_keys)
    for trial in range(300):
        requests = rng.choice((1, 16, 64, 256))
        lengths = [rng.randint(1, rng.choice((most_keys, max(1, most_keys // 99)))) for _ in range(requests)]
        if trial % 2:
            lengths = [most_keys if i < trial % 97 else 1 for i in range(requests)]
        programs = rng.choice((6, 40, 216, 264, splits.PREFIX_PROGRAMS))
        most = splits.count_partials(requests, most_keys, kv_heads)
        assert most <= requests * splits.count_splits(most_keys)
        if requests * kv_heads < splits.PREFIXED_ITEMS:
            assert most == requests * splits.count_splits(most_keys)
            continue
        prefix = prefix_end(lengths, kv_heads * rng.choice((1, 2, 8)), programs)
        used = requests + sum(max(0, splits.count_splits(length) - prefix) for length in lengths)
        assert used <= most, (trial, lengths[:9])
    assert splits.count_partials(256, 262144, 4) == 2 * 256 + 40 * 600
    assert splits.count_partials(32, 262144, 4) == 2 * 32 + 32 * 600 * 6 // 10


def test_a_process_whose_default_dtype_is_narrow_gets_the_same_bits():
    """A framework sets it while it loads a model; the call also has rows of no prompt chunk."""
    args = make([70], 8, 4, 2, 64)
    chunk = (torch.tensor([0]), torch.tensor([5]))
    expected = [paged_attention(*args), paged_attention(*args, *chunk)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [paged_attention(*args), paged_attention(*args, *chunk)]
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted)
    assert torch.equal(found[0][:5], found[1][:5])
