"""`qk_norm_rope_kv_write`: the reference against float64, the rows that it writes and those that it leaves
alone."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from tests.ops.harness import assert_same_bits, check_equal, check_launch

F8 = torch.float8_e4m3fn


def make(rows, hq, hkv, hd, dtype=torch.float32, block_size=16, rot=None, fp8=False, seed=0, device="cpu"):
    """Return one call's arguments; the cache holds NaN, and every third row writes nothing."""
    g = torch.Generator().manual_seed(seed)
    rot = rot or hd // 4
    num_blocks = 2 + -(-rows // block_size) * 2
    qkv = torch.randn(rows, (2 * hq + 2 * hkv) * hd + 8, generator=g).to(dtype)[:, :-8]
    weights = [(torch.randn(hd, generator=g) * 0.3).to(dtype) for _ in range(2)]
    angle = torch.arange(512).unsqueeze(1) * 1e4 ** (-torch.arange(rot // 2) / (rot // 2))
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    positions = torch.randperm(512, generator=g)[:rows]
    slots = torch.randperm((num_blocks - 1) * block_size, generator=g)[:rows] + block_size
    slots[::3] = -1
    kv = torch.full((num_blocks, 2, hkv, block_size, hd), torch.nan)
    scale = torch.full(kv.shape[:-1], torch.nan) if fp8 else None
    kv = kv.to(F8 if fp8 else dtype)
    args = [qkv, *weights, cos_sin, positions, slots, kv, scale]
    base = torch.randn(rows, qkv.shape[1] + 8, generator=g).to(dtype).to(device)
    args[0] = base[:, :-8]
    return [args[0], *(t if t is None else t.to(device) for t in args[1:]), hq, hkv, 1e-6]


def exact(args):
    """Return rotated queries and keys in float64 by complex multiplication, and the values."""
    qkv, q_weight, k_weight, cos_sin, positions, _, kv, _, hq, hkv, eps = args
    hd, rot = kv.shape[4], cos_sin.shape[1]
    x = qkv.double().unflatten(1, (-1, hd))
    q, k, v = x[:, : 2 * hq : 2], x[:, 2 * hq : 2 * hq + hkv], x[:, 2 * hq + hkv :]
    turn = torch.complex(*cos_sin[positions].double().chunk(2, dim=1)).unsqueeze(1)
    out = []
    for t, weight in ((q, q_weight), (k, k_weight)):
        t = t / (t.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.double())
        pair = torch.complex(t[..., : rot // 2], t[..., rot // 2 : rot]) * turn
        out.append(torch.cat((pair.real, pair.imag, t[..., rot:]), dim=-1))
    return *out, v


@pytest.mark.parametrize("rot", [None, 64])
@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (3, 1)])
def test_reference_matches_float64(hq, hkv, rot):
    args = make(7, hq, hkv, 64, rot=rot)
    q = qk_norm_rope_kv_write(*args)
    want_q, want_k, want_v = exact(args)
    torch.testing.assert_close(q.double(), want_q, rtol=0, atol=2e-6)
    kv, slots = args[6], args[5]
    for m, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(kv[slot // 16, 0, :, slot % 16].double(), want_k[m], rtol=0, atol=2e-6)
            assert torch.equal(kv[slot // 16, 1, :, slot % 16].double(), want_v[m])
    untouched = torch.ones(kv.shape[0] * 16, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert kv.transpose(1, 3).flatten(0, 1)[untouched].isnan().all()
    assert (slots < 0).any()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("slots", [[70], [13, 14, 15], [14, 15, 16], [20, -1, 21], [30, 29, 28], [-1], []])
def test_the_cpu_writes_what_the_specification_does(slots, fp8):
    """Rows that are neighbours in one block, in two blocks, in no order, and rows that write nothing."""
    args = make(len(slots), 3, 1, 64, fp8=fp8)
    args[5] = torch.tensor(slots, dtype=torch.int64)
    args[6:8] = [t if t is None else torch.cat([t] * 5) for t in args[6:8]]
    reference = qk_norm_rope_kv_write.reference
    # A norm summed in another order may round to another e4m3 value.
    rtol = 2**-3 if fp8 else 2e-6
    check_equal(qk_norm_rope_kv_write, reference, args, rtol=rtol, atol=1e-6, mutated=(6, 7))


def test_bfloat16_is_the_float32_result_rounded_once():
    args = make(5, 4, 2, 64, dtype=torch.bfloat16)
    wide = [t.float() if isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16 else t for t in args]
    assert torch.equal(qk_norm_rope_kv_write(*args), qk_norm_rope_kv_write(*wide).bfloat16())
    assert torch.equal(args[6].nan_to_num(), wide[6].bfloat16().nan_to_num())


def test_fp8_keeps_one_scale_per_vector():
    args = make(9, 4, 2, 64, fp8=True)
    args[0][1, 8 * 64 :] *= 1e5  # large keys and values
    args[0][2, 8 * 64 :] *= 1e-5
    args[0][4, 10 * 64 : 11 * 64] = 0.0  # a value head of zeros
    qk_norm_rope_kv_write(*args)
    _, want_k, want_v = exact(args)
    kv, scale = args[6], args[7]
    for m, slot in enumerate(args[5].tolist()):
        if slot < 0:
            continue
        for half, want in enumerate((want_k[m], want_v[m])):
            factor = scale[slot // 16, half, :, slot % 16].double()
            torch.testing.assert_close(factor, want.abs().amax(-1) / 448, rtol=1e-5, atol=0)
            got = kv[slot // 16, half, :, slot % 16].double() * factor.unsqueeze(-1)
            # e4m3 has 3 mantissa bits, and steps of 2^-9 below 2^-6.
            bound = torch.maximum(want.abs() * 2**-4, factor.unsqueeze(-1) * 2**-10) * 1.0001
            assert ((got - want).abs() <= bound).all()
    assert int((scale == 0).sum()) == 1
    assert scale.isnan().any()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (3, 1), (1, 1)])
def test_bits_of_a_row_do_not_depend_on_other_rows(hq, hkv, dtype, threads):
    def run(rows):
        args = make(33, hq, hkv, 64, dtype=dtype)
        for i in (0, 4, 5):
            args[i] = args[i][rows]
        q = qk_norm_rope_kv_write(*args)
        slots = args[5][args[5] >= 0]
        return q, args[6][slots // 16, :, :, slots % 16]

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q, kv = run(torch.arange(33))
        torch.set_num_threads(threads)
        position = torch.tensor([m // 3 * 2 + m % 3 - 1 for m in range(33)])
        for rows in (torch.tensor([5]), torch.arange(32, -1, -1), torch.arange(3, 10), torch.tensor([1, 31])):
            got_q, got_kv = run(rows)
            assert torch.equal(got_q, q[rows])
            assert torch.equal(got_kv, kv[position[rows[rows % 3 != 0]]])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fp8", [False, True])
def test_opcheck(fp8):
    args = make(5, 4, 2, 64, fp8=fp8)
    args[6].view(torch.uint8 if fp8 else torch.float32).zero_()
    if fp8:
        args[7].zero_()
    # opcheck's schema test compares tensors by arithmetic that torch lacks for float8 on the CPU.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    overload = torch.ops.compiled_mtp.qk_norm_rope_kv_write.default
    torch.library.opcheck(overload, (*args, 0, 0), test_utils=tests if fp8 else "ALL")


def test_traces_as_one_graph_at_two_sizes():
    compiled = torch.compile(qk_norm_rope_kv_write, fullgraph=True, backend="aot_eager", dynamic=False)
    for rows in (5, 2):
        args, same = make(rows, 4, 2, 64), make(rows, 4, 2, 64)
        assert torch.equal(compiled(*args), qk_norm_rope_kv_write(*same))
        assert torch.equal(args[6].nan_to_num(), same[6].nan_to_num())


@pytest.mark.parametrize(
    ("message", "index", "value"),
    [
        ("qkv must have shape", 0, lambda t: t[:, :-1]),
        ("qkv must have dtype", 0, lambda t: t.half()),
        ("qkv must have a last dimension of stride 1", 0, lambda t: t.T.contiguous().T),
        ("qkv must have shape", 1, lambda t: t[1:]),
        ("k_weight must have shape", 2, lambda t: t[1:]),
        ("cos_sin must have shape", 3, lambda t: t[0]),
        ("cos_sin must have dtype", 3, lambda t: t.bfloat16()),
        ("rotary dims must be even", 3, lambda t: t[:, 1:]),
        ("positions must have shape", 4, lambda t: t[1:]),
        ("slot_mapping must have dtype", 5, lambda t: t.int()),
        ("kv must have shape", 6, lambda t: t[:, :, :1]),
        ("kv must have dtype", 6, lambda t: t.bfloat16()),
        ("kv_scale must have shape", 7, lambda t: torch.ones(1)),
    ],
)
def test_errors_name_the_argument(message, index, value):
    args = make(5, 4, 2, 64)
    args[index] = value(args[index])
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_kv_write(*args)


@pytest.mark.parametrize(
    ("dtype", "fp8", "hd", "rot"),
    [
        (torch.float32, False, 64, 16),
        (torch.float32, False, 48, 48),
        (torch.bfloat16, False, 64, 16),
        (torch.bfloat16, True, 64, 32),
    ],
)
def test_kernel_in_interpreter(interpreter, dtype, fp8, hd, rot):
    args = make(7, 3, 2, hd, dtype=dtype, rot=rot, fp8=fp8)
    # Norms may differ in the last bit, and so may the values rounded to the stored type.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype] if not fp8 else 2**-3
    check_launch(qk_norm_rope_kv_write, args, rtol=tolerance, atol=1e-6, mutated=(6, 7))


@pytest.mark.parametrize("fp8", [False, True])
def test_the_number_of_heads_of_a_program_changes_no_bit(interpreter, monkeypatch, fp8):
    from compiled_mtp.ops.qk_norm_rope_kv_write import kernel

    found = []
    for least in ((9, 9), (1, 9), (1, 1)):
        monkeypatch.setattr(kernel, "LEAST_ROWS_OF_TWO", least[0])
        monkeypatch.setattr(kernel, "LEAST_ROWS_OF_FOUR", least[1])
        args = make(7, 8, 2, 64, dtype=torch.bfloat16, fp8=fp8)
        found.append((qk_norm_rope_kv_write.launch(*args), *(x for x in args[6:8] if x is not None)))
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_a_program_has_queries_only_or_none():
    from compiled_mtp.ops.qk_norm_rope_kv_write.kernel import heads_of_program

    assert [heads_of_program(rows, 24, 4) for rows in (1, 31, 32, 255, 256, 4096)] == [1, 1, 2, 2, 4, 4]
    # Ranks may have few heads.
    assert [heads_of_program(256, *heads) for heads in ((8, 2), (6, 1), (3, 1), (12, 1))] == [4, 2, 1, 2]


def with_axes(args, seed=3):
    """Return the arguments with rows' positions on three axes; the row has frequencies 1, 4 of 8, the column
    2."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(512, generator=g)[: args[0].shape[0]] for _ in range(3)])
    return [*args[:4], positions.to(args[0].device), *args[5:], 6, 5]


def test_each_frequency_takes_its_axis():
    args = with_axes(make(7, 4, 2, 64))
    axes, cos_sin, half = [0, 1, 2, 0, 1, 0, 0, 0], args[3], 8
    # One row per table entry: the exact result for a table that has each row's own angles.
    own = torch.stack([cos_sin[args[4][axes[j % half]], j] for j in range(2 * half)], dim=1)
    plain = [*args[:3], own, torch.arange(7), *args[5:6], args[6].clone(), *args[7:11]]
    for call in (qk_norm_rope_kv_write, qk_norm_rope_kv_write.reference):
        q, want = call(*args), call(*plain)
        assert torch.equal(q, want)
        assert torch.equal(args[6].nan_to_num(), plain[6].nan_to_num())


def test_equal_axes_are_one_axis_to_the_bit():
    args, plain = make(9, 3, 1, 64), make(9, 3, 1, 64)
    args[4] = torch.stack([args[4]] * 3)
    assert torch.equal(qk_norm_rope_kv_write(*args, 6, 5), qk_norm_rope_kv_write(*plain))
    assert torch.equal(args[6].nan_to_num(), plain[6].nan_to_num())


def test_two_axes_are_refused():
    args = make(5, 4, 2, 64)
    args[4] = torch.stack([args[4]] * 2)
    with pytest.raises(ValueError, match=r"positions must have shape \(M,\) or \(3, M\)"):
        qk_norm_rope_kv_write(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_axes_in_interpreter(interpreter, dtype):
    args = with_axes(make(7, 3, 2, 64, dtype=dtype))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    check_launch(qk_norm_rope_kv_write, args, rtol=tolerance, atol=1e-6, mutated=(6, 7))
