"""Random GDN layers for the tests: inputs distributed as in a checkpoint, and a float64 recurrence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.ops.harness import assert_same_bits


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the body with `count` intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    @property
    def key(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def channels(self) -> int:
        return 2 * self.key + self.value

    @property
    def columns(self) -> int:
        return self.channels + self.value + 2 * self.num_v_heads

    @property
    def dims(self) -> tuple[int, int, int, int]:
        return self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim


@dataclass
class Layer:
    """The weights of one GDN layer between the two projections."""

    shape: Shape
    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor

    def cpu(self) -> Layer:
        return Layer(
            self.shape, self.conv_weight.cpu(), self.a_log.cpu(), self.dt_bias.cpu(), self.norm_weight.cpu()
        )


def make_layer(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Layer:
    """Return a layer with decay rates exp(a_log) from 0.02 to 16: checkpoints have both slow and very fast
    heads."""
    rng = torch.Generator().manual_seed(seed)
    heads = shape.num_v_heads
    return Layer(
        shape,
        (torch.randn(shape.channels, 4, generator=rng) * 0.5).to(device, dtype),
        torch.empty(heads).uniform_(-4.0, 2.8, generator=rng).to(device),
        torch.empty(heads).uniform_(-3.0, 1.0, generator=rng).to(device),
        torch.empty(shape.head_v_dim).uniform_(0.5, 1.5, generator=rng).to(device),
    )


def make_proj(
    shape: Shape,
    rows: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    padding: int = 0,
    device: str = "cpu",
) -> torch.Tensor:
    """Return rows of the merged input projection, with NaN in the padding columns."""
    rng = torch.Generator().manual_seed(seed)
    proj = torch.randn(rows, shape.columns + padding, generator=rng)
    if padding:
        proj[:, -padding:] = torch.nan
    return proj.to(device, dtype)


@dataclass
class Cache:
    """State and rings of one layer; the rings hold NaN, so that reading before writing shows."""

    state: torch.Tensor
    ring_k: torch.Tensor
    ring_u: torch.Tensor
    ring_g: torch.Tensor
    conv_ring: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.state, self.ring_k, self.ring_u, self.ring_g, self.conv_ring

    def clone(self) -> Cache:
        return Cache(*(t.clone() for t in self.tensors))


def make_cache(
    shape: Shape, slots: int, ring: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Cache:
    """Return a cache with NaN rings and random states; the state of slot 0 is zero."""
    rng = torch.Generator().manual_seed(7)
    state = torch.randn(slots, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim, generator=rng) * 0.3
    state[0] = 0.0
    nan = torch.nan
    return Cache(
        state.to(device),
        torch.full((slots, shape.num_k_heads, ring, shape.head_k_dim), nan, device=device),
        torch.full((slots, shape.num_v_heads, ring, shape.head_v_dim), nan, device=device),
        torch.full((slots, shape.num_v_heads, ring), nan, device=device),
        torch.full((slots, ring, shape.channels), nan, device=device, dtype=dtype),
    )


def recurrence_float64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exp_g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule of one sequence in float64: (o [T, nv, dv], state [nv, dv, dk])."""
    group = v.shape[1] // k.shape[1]
    q, k = (x.double().repeat_interleave(group, dim=1) for x in (q, k))
    v, exp_g, beta, current = v.double(), exp_g.double(), beta.double(), state.double().clone()
    out = torch.empty_like(v)
    for t in range(v.shape[0]):
        current = current * exp_g[t, :, None, None]
        u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", current, k[t]))
        current = current + u[..., None] * k[t, :, None, :]
        out[t] = torch.einsum("hvk,hk->hv", current, q[t])
    return out, current


def gated_norm_float64(
    out: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_activation: str
) -> torch.Tensor:
    """rmsnorm(out) * norm_weight * act(z), [T, nv*dv] float64."""
    out = out.double()
    gate = z.double().view(out.shape)
    gate = torch.sigmoid(gate) if gate_activation == "sigmoid" else torch.nn.functional.silu(gate)
    norm = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps)
    return (norm * norm_weight.double() * gate).flatten(1)


def gates_apart(proj: torch.Tensor, width: int, num_gates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q|k|v|z, and b|a with its own row stride."""
    wide = torch.full((proj.shape[0], num_gates + 3), torch.nan, dtype=proj.dtype)
    wide[:, :num_gates] = proj[:, width : width + num_gates]
    return proj[:, :width].contiguous(), wide[:, :num_gates]


def conv_float64(layer: Layer, proj: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(q, k, v, exp_g, beta) of one whole sequence from position 0, in float64 from the formulas."""
    shape, rows = layer.shape, proj.shape[0]
    x = proj.double()
    weight = layer.conv_weight.double()[:, None]
    mixed = torch.nn.functional.conv1d(
        x[None, :, : shape.channels].mT, weight, padding=3, groups=shape.channels
    )
    mixed = torch.nn.functional.silu(mixed[0, :, :rows].T)
    q, k, v = mixed.split((shape.key, shape.key, shape.value), dim=1)
    q, k = (
        t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
        for t in (t.reshape(rows, shape.num_k_heads, shape.head_k_dim) for t in (q, k))
    )
    first = shape.channels + shape.value
    b, a = x[:, first : first + 2 * shape.num_v_heads].chunk(2, dim=1)
    g = -torch.exp(layer.a_log.double()) * torch.nn.functional.softplus(a + layer.dt_bias.double())
    v = v.reshape(rows, shape.num_v_heads, shape.head_v_dim)
    return q * shape.head_k_dim**-0.5, k, v, torch.exp(g), torch.sigmoid(b)


Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_window(
    shape: Shape, rows: int, dtype: torch.dtype = torch.float32, seed: int = 2, device: str = "cpu"
) -> Window:
    """Inputs (q, k, v, exp_g, beta, z) of gdn_verify; z is a strided view, its neighbours are NaN."""
    rng = torch.Generator().manual_seed(seed)

    def unit(*size: int) -> torch.Tensor:
        x = torch.randn(*size, generator=rng)
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    q = unit(rows, shape.num_k_heads, shape.head_k_dim) * shape.head_k_dim**-0.5
    k = unit(rows, shape.num_k_heads, shape.head_k_dim)
    v = torch.randn(rows, shape.num_v_heads, shape.head_v_dim, generator=rng)
    exp_g = torch.exp(-torch.empty(rows, shape.num_v_heads).exponential_(4.0, generator=rng))
    beta = torch.sigmoid(torch.randn(rows, shape.num_v_heads, generator=rng))
    wide = torch.full((rows, shape.value + 6), torch.nan)
    wide[:, 2:-4] = torch.randn(rows, shape.value, generator=rng)
    z = wide.to(device, dtype)[:, 2:-4]
    return q.to(device), k.to(device), v.to(device), exp_g.to(device), beta.to(device), z


def make_prompt(layer: Layer, rows: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Window:
    """Inputs (q, k, v, g, beta, z) of gdn_prefill, with the log decays that the layer's weights give."""
    proj = make_proj(layer.shape, rows, seed=5)
    q, k, v, exp_g, beta = conv_float64(layer.cpu(), proj)
    g = torch.log(exp_g.clamp(min=1e-30))
    z = proj[:, layer.shape.channels : layer.shape.channels + layer.shape.value].to(device, dtype)
    q, k, v, g, beta = (t.float().contiguous().to(device) for t in (q, k, v, g, beta))
    return q, k, v, g, beta, z


def select_rows(window: Window, rows: list[int]) -> Window:
    """Return the given rows of every input."""
    q, k, v, exp_g, beta, z = window
    return q[rows], k[rows], v[rows], exp_g[rows], beta[rows], z[rows]


def fold(
    verify: Callable[..., Any],
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """Fold the ring entries of [base, pos) into the states, as a window of one token does; overwrites the
    rings."""
    batch, dim_k, (heads, dim_v) = len(state_index), ring_k.shape[3], state.shape[1:3]
    key = state.new_zeros((batch, ring_k.shape[1], dim_k))
    gates = state.new_zeros((batch, heads))
    values = state.new_zeros((batch, heads, dim_v))
    norm = (values.flatten(1), values[0, 0], state, ring_k, ring_u, ring_g, state_index, base, pos)
    verify(key, key, values, gates, gates, *norm, 1e-6, "silu")


@dataclass
class Stream:
    """Requests that gdn_verify decodes: their slots and cursors, which advance as in the engine."""

    layer: Layer
    cache: Cache
    slots: list[int]
    base: list[int]
    pos: list[int]
    gate_activation: str = "silu"
    eps: float = 1e-6
    max_unfolded: int = 0

    def cursors(self, requests: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = self.cache.state.device
        return (
            torch.tensor([self.slots[r] for r in requests], dtype=torch.int32, device=device),
            torch.tensor([self.base[r] for r in requests], device=device),
            torch.tensor([self.pos[r] for r in requests], device=device),
        )

    def verify(
        self, verify: Callable[..., torch.Tensor], window: Window, requests: list[int]
    ) -> torch.Tensor:
        """Verify one window of the given requests; sets `base` to `pos` where the state is stored.

        `pos` changes in `accept` only.
        """
        cache = self.cache
        y = verify(
            *window, self.layer.norm_weight, cache.state, cache.ring_k, cache.ring_u, cache.ring_g,
            *self.cursors(requests), self.eps, self.gate_activation, max_unfolded=self.max_unfolded,
        )  # fmt: skip
        query_len = len(window[0]) // len(requests)
        for request in requests:
            if self.pos[request] - self.base[request] + query_len > self.max_unfolded:
                self.base[request] = self.pos[request]
        return y

    def accept(self, request: int, count: int, query_len: int) -> None:
        """Advance by `count` tokens, and write NaN to the ring entries of the window's other tokens."""
        ring_length = self.cache.ring_k.shape[2]
        rejected = [(self.pos[request] + t) % ring_length for t in range(count, query_len)]
        for ring in (self.cache.ring_k, self.cache.ring_u, self.cache.ring_g):
            ring[self.slots[request]][:, rejected] = torch.nan
        self.pos[request] += count

    def folded(self, verify: Callable[..., Any]) -> torch.Tensor:
        """Return the states at `pos`, folded in a copy; the stream itself does not change."""
        copy = self.cache.clone()
        index, base, pos = self.cursors(list(range(len(self.slots))))
        fold(verify, copy.state, copy.ring_k, copy.ring_u, copy.ring_g, index, base, pos)
        return copy.state[index.long()]


def check_windows_equal_single_steps(
    verify: Callable[..., torch.Tensor],
    shape: Shape,
    *,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Check that windows and single steps give the same outputs and states, bit for bit.

    Windows: changing W, three requests per call, random acceptance, NaN in rejected ring entries. Single
    steps: one request and one token per call. Other slots must stay unchanged.
    """
    rng = torch.Generator().manual_seed(11)
    layer = make_layer(shape, dtype, device=device)
    slots, start = [3, 2, 4], [0, 61, 7]
    windows, single = (
        Stream(layer, make_cache(shape, 6, 32, dtype, device), slots, list(start), list(start))
        for _ in range(2)
    )
    before = windows.cache.clone()
    for round_number in range(rounds):
        query_len = (4, 1, 8, 3, 16, 5, 2, 15, 7, 6)[round_number % 10]
        window = make_window(shape, 3 * query_len, dtype, seed=100 + round_number, device=device)
        y = windows.verify(verify, window, [0, 1, 2])
        for request in range(3):
            count = int(torch.randint(1, query_len + 1, (1,), generator=rng))
            for token in range(count):
                row = request * query_len + token
                alone = single.verify(verify, select_rows(window, [row]), [request])
                assert torch.equal(alone[0], y[row]), (round_number, request, token)
                single.accept(request, 1, 1)
            windows.accept(request, count, query_len)
        assert windows.pos == single.pos
        states = windows.folded(verify)
        assert torch.isfinite(states).all()
        assert torch.equal(states, single.folded(verify)), round_number
    for now, then in zip(windows.cache.tensors, before.tensors, strict=True):
        assert torch.equal(now[[1, 5]].nan_to_num(), then[[1, 5]].nan_to_num())
        assert torch.equal(now[[1, 5]].isnan(), then[[1, 5]].isnan())


def check_unfolded_states(
    verify: Callable[..., torch.Tensor],
    shape: Shape,
    *,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Check that rounds which leave entries unfolded give the bits of rounds that store every state.

    Eight requests in most rounds, two in some; changing W, random acceptance, NaN in rejected ring entries.
    """
    rng = torch.Generator().manual_seed(5)
    layer, slots = make_layer(shape, dtype, device=device), [3, 2, 4, 8, 1, 7, 5, 6]
    lazy, eager = (
        Stream(layer, make_cache(shape, 9, 16, dtype, device), slots, [61] * 8, [61] * 8, max_unfolded=limit)
        for limit in (8, 0)
    )
    num_stored = 0
    for round_number in range(rounds):
        query_len = (4, 2, 4, 1, 8, 3)[round_number % 6]
        requests = [6, 1] if round_number % 7 == 6 else list(range(8))
        window = make_window(shape, len(requests) * query_len, dtype, seed=200 + round_number, device=device)
        before, base = lazy.cache.state.clone(), list(lazy.base)
        assert_same_bits([lazy.verify(verify, window, requests)], [eager.verify(verify, window, requests)])
        for request in requests:
            if lazy.base[request] == base[request]:
                assert torch.equal(lazy.cache.state[slots[request]], before[slots[request]])
            num_stored += lazy.base[request] != base[request]
            count = int(torch.randint(1, query_len + 1, (1,), generator=rng))
            for stream in (lazy, eager):
                stream.accept(request, count, query_len)
        assert_same_bits([lazy.folded(verify)], [eager.folded(verify)])
    assert 0 < num_stored < 8 * rounds / 2
