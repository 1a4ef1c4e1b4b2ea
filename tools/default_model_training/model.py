"""The training model: the Qwen3.5 dense architecture and its MTP head in plain, differentiable PyTorch.

Parameters have the names of the released text-only checkpoints, so `state_dict()` is exported as it is.
Source: transformers 5.23 `models/qwen3_5` and the Qwen3-Next report; chunked rule: arXiv 2412.06464.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; the defaults are those of the checkpoint that ships."""

    vocab_size: int = 4160
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 8
    full_attention_interval: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 128
    conv_kernel: int = 4
    eps: float = 1e-6
    dropout: float = 0.0

    @property
    def rotary_dim(self) -> int:
        """Return how many leading dimensions of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def is_full_attention(self, layer: int) -> bool:
        """Return whether trunk layer `layer` (from 0) is a full-attention layer."""
        return (layer + 1) % self.full_attention_interval == 0


class RMSNorm(nn.Module):
    """RMSNorm with the factor (1 + weight), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm of the GDN output with weight as is, times silu of the z gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        x = x.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed * self.weight * F.silu(z.float())


def rope_tables(positions: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, rotary_dim / 2] float32 of `positions` [T]."""
    exponent = torch.arange(0, shape.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * (1.0 / shape.rope_theta ** (exponent / shape.rotary_dim))
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of x [B, T, heads, head_dim], pairs (j, j + half)."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Attention(nn.Module):
    """Gated full attention with q/k norm, partial rotary embedding and grouped heads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, 2 * shape.num_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * width, hidden, bias=False)
        self.q_norm = RMSNorm(width, shape.eps)
        self.k_norm = RMSNorm(width, shape.eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, hq, T, hd], k and v [B, hkv, T, hd] after norm and rope, gate [B, T, hq * hd]."""
        batch, length, _ = x.shape
        width = self.shape.head_dim
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * width).split(width, dim=-1)
        k = self.k_proj(x).view(batch, length, -1, width)
        v = self.v_proj(x).view(batch, length, -1, width)
        q = apply_rope(self.q_norm(q), cos, sin).to(v.dtype)
        k = apply_rope(self.k_norm(k), cos, sin).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.reshape(batch, length, -1)

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Output [B, T, H] from the attention result [B, hq, T, hd] and the gate."""
        mixed = mixed.transpose(1, 2).reshape(gate.shape)
        return self.o_proj(mixed * torch.sigmoid(gate))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(mixed, gate)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over whole sequences in chunks of 64, float32, from a zero state.

    q, k [B, T, nk, dk] (normalised), v [B, T, nv, dv], g (log decay) and beta [B, T, nv].
    Returns the outputs [B, T, nv, dv].
    """
    batch, length, key_heads, _ = q.shape
    value_heads = v.shape[2]
    ratio = value_heads // key_heads
    padding = -length % CHUNK
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, padding)) for x in (g, beta))
    chunks = (length + padding) // CHUNK

    def split(x: Tensor) -> Tensor:
        return x.unflatten(1, (chunks, CHUNK)).transpose(2, 3).transpose(1, 2)

    q, k, v = split(q), split(k), split(v)
    g, beta = (split(x[..., None]).squeeze(-1) for x in (g, beta))
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    difference = total[..., :, None] - total[..., None, :]
    decay = torch.exp(difference.masked_fill(~causal, float("-inf")))

    def repeat(x: Tensor) -> Tensor:
        return x.repeat_interleave(ratio, dim=1)

    products = repeat(k @ k.transpose(-1, -2))
    strict = (beta[..., None] * products * decay).tril(-1)
    queries, keys = repeat(q), repeat(k)
    grown = torch.exp(total)[..., None]
    right = torch.cat([beta[..., None] * v, (beta[..., None] * grown) * keys], dim=-1)
    # (I + strict)^-1 @ right: the ones of the diagonal are implied.
    solved = torch.linalg.solve_triangular(strict, right, upper=False, unitriangular=True)
    update, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = total[..., -1:]
    tail = (torch.exp(last - total)[..., None] * keys).transpose(-1, -2)
    carry = torch.exp(last)[..., None]

    state = q.new_zeros(batch, value_heads, k.shape[-1], v.shape[-1])
    states, writes = [], []
    for chunk in range(chunks):
        states.append(state)
        written = update[:, :, chunk] - read[:, :, chunk] @ state
        writes.append(written)
        state = carry[:, :, chunk] * state + tail[:, :, chunk] @ written
    scores = repeat(q @ k.transpose(-1, -2)) * decay
    out = (grown * queries) @ torch.stack(states, dim=2) + scores @ torch.stack(writes, dim=2)
    out = out.transpose(1, 2).transpose(2, 3).flatten(1, 2)
    return out[:, :length]


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet mixer with a causal depthwise convolution over q, k and v."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden_size, shape.linear_head_dim
        self.key_dim = shape.linear_key_heads * width
        self.value_dim = shape.linear_value_heads * width
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, shape.linear_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, shape.linear_value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.linear_value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.linear_value_heads))
        self.norm = GatedNorm(width, shape.eps)
        self.out_proj = nn.Linear(self.value_dim, hidden, bias=False)

    def convolve(self, raw: Tensor) -> Tensor:
        """silu of the causal convolution of `raw` [B, T, C]."""
        taps, weight = self.shape.conv_kernel, self.conv1d.weight[:, 0].to(raw.dtype)
        padded = F.pad(raw, (0, 0, taps - 1, 0))
        moved = [padded[:, tap : tap + raw.shape[1]] * weight[:, tap] for tap in range(taps)]
        return F.silu(torch.stack(moved).sum(0))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay and beta [B, T, nv], float32."""
        step = F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return -self.A_log.exp() * step, torch.sigmoid(self.in_proj_b(x).float())

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (normalised and scaled), k (normalised) and v, float32, [B, T, heads, width]."""
        width = self.shape.linear_head_dim
        parts = mixed.float().split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, width)) for part in parts)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * width**-0.5
        return q, k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.convolve(self.in_proj_qkv(x)))
        g, beta = self.gates(x)
        with torch.autocast(x.device.type, enabled=False):
            mixed = gated_delta_rule(q, k, v, g, beta)
        z = self.in_proj_z(x).unflatten(-1, (-1, self.shape.linear_head_dim))
        return self.out_proj(self.norm(mixed, z).flatten(-2).to(z.dtype))


class FeedForward(nn.Module):
    """down(silu(gate x) * (up x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Norm, mixer, norm, feed-forward, each added to the residual stream."""

    def __init__(self, shape: ModelShape, is_full_attention: bool) -> None:
        super().__init__()
        self.is_full_attention = is_full_attention
        self.dropout = shape.dropout
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        if is_full_attention:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mlp = FeedForward(shape)

    def add(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Add the mixer's output, then the feed-forward of the sum."""
        residual = residual + F.dropout(mixed, self.dropout, self.training)
        forward = self.mlp(self.post_attention_layernorm(residual))
        return residual + F.dropout(forward, self.dropout, self.training)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        mixed = self.self_attn(normed, cos, sin) if self.is_full_attention else self.linear_attn(normed)
        return self.add(x, mixed)


class Trunk(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, shape.is_full_attention(i)) for i in range(shape.num_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.eps)


class MtpHead(nn.Module):
    """The multi-token-prediction head: one full-attention layer over (token, previous hidden) pairs.

    The pair at position j is (token j, hidden j - 1), with rotary position j, and predicts token j + 1.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden_size, shape.eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden_size, shape.eps)
        self.layers = nn.ModuleList([DecoderLayer(shape, True)])
        self.norm = RMSNorm(shape.hidden_size, shape.eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, depths: int
    ) -> list[Tensor]:
        """Return post-norm hiddens [B, T, H] of draft depths 1..depths at every position, as in decoding.

        `embedded` [B, T, H] are the embedded tokens, `hidden` the trunk's post-norm hiddens. Depth d at
        position j attends to the depth-1 pairs of positions 1..j-d+1 (the committed pairs of a round that
        starts there) and to the depth-2..d pairs of its own chain, exactly as in decoding. Positions j < d of
        depth d hold no valid result.
        """
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        attention = layer.self_attn
        length = embedded.shape[1]
        normed_embedding = self.pre_fc_norm_embedding(embedded)
        positions = torch.arange(length, device=embedded.device)
        # The committed pairs' keys and values, then those of each later depth.
        cached: list[tuple[Tensor, Tensor]] = []
        previous, outputs = hidden, []
        groups = self.shape.num_heads // self.shape.num_kv_heads
        for depth in range(1, depths + 1):
            shifted = F.pad(previous, (0, 0, 1, 0))[:, :-1]
            pair = self.fc(torch.cat([normed_embedding, self.pre_fc_norm_hidden(shifted)], dim=-1))
            pair = pair.to(embedded.dtype)
            q, k, v, gate = attention.project(layer.input_layernorm(pair), cos, sin)
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
            cached.append((k, v))
            (keys, values), *chain = cached
            scale = self.shape.head_dim**-0.5
            visible = (positions[None, :] >= 1) & (positions[None, :] <= positions[:, None] - (depth - 1))
            if depth == 1:
                visible = visible | (positions[:, None] + positions[None, :] == 0)
            scores = (q @ keys.transpose(-1, -2)).float() * scale
            scores = scores.masked_fill(~visible, float("-inf"))
            moved = [[_shift(x, depth - 2 - index) for x in pair] for index, pair in enumerate(chain)]
            own = [(q * key).float().sum(-1, keepdim=True) * scale for key, _ in moved]
            weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(values.dtype)
            mixed = weights[..., :length] @ values
            for index, (_, value) in enumerate(moved):
                mixed = mixed + weights[..., length + index, None] * value
            previous = self.norm(layer.add(pair, attention.finish(mixed, gate)))
            outputs.append(previous)
        return outputs


def _shift(x: Tensor, count: int) -> Tensor:
    """Move x [B, heads, T, width] `count` positions later."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x


class TrainingModel(nn.Module):
    """Trunk and MTP head with a tied output projection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = MtpHead(shape)

    def initialise(self, seed: int) -> None:
        """Draw all weights anew from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * self.shape.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            if "embed_tokens" in name:
                std = 0.02
            elif "conv1d" in name:
                std = self.shape.conv_kernel**-0.5
            else:
                std = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    std *= depth_scale
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                heads = self.shape.linear_value_heads
                module.A_log.data.copy_(torch.log(1.0 + 15.0 * torch.rand(heads, generator=generator)))
                step = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3, generator=generator))
                module.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Post-norm hiddens [B, T, H] of `tokens` [B, T]."""
        cos, sin = rope_tables(torch.arange(tokens.shape[1], device=tokens.device), self.shape)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def drafts(self, tokens: Tensor, hidden: Tensor, depths: int) -> list[Tensor]:
        """MTP hiddens of depths 1..depths [B, T, H], teacher-forced on `tokens` [B, T] (see MtpHead)."""
        cos, sin = rope_tables(torch.arange(tokens.shape[1], device=tokens.device), self.shape)
        return self.mtp(self.model.embed_tokens(tokens), hidden, cos, sin, depths)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary from post-norm hiddens."""
        return F.linear(hidden, self.model.embed_tokens.weight)
