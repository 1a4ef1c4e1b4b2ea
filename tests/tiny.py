"""Tiny random models without a checkpoint, for tests of the step: quick rather than realistic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.moves import Moves
from compiled_mtp.cache.slot_state import SlotState
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.rotary import rotary_table
from compiled_mtp.models.rows import PrefillRows, place_prompt_chunks
from compiled_mtp.models.weight_format import NO_FORMATS, Formats
from compiled_mtp.plan import Admit, BlockUpdate, Release, SlotSampling, StepPlan
from compiled_mtp.rounds.catch_up import catch_up as catch_up_step
from compiled_mtp.rounds.drafters import choose_drafters
from compiled_mtp.rounds.first_token import first_token
from compiled_mtp.rounds.prefill import prefill as prefill_step
from compiled_mtp.step import SlotSizes, Step
from compiled_mtp.step_output import StepOutput

BLOCK_SIZE = 16


def tiny_config(**changes: Any) -> ModelConfig:
    """Return a config: three GDN layers and one attention layer, head_dim 64, dk = dv = 32, vocabulary 97."""
    config = ModelConfig(
        family="qwen3_5",
        num_layers=4,
        hidden_size=48,
        vocab_size=97,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        conv_kernel=4,
        is_full_attention=(False, False, False, True),
        intermediate_size=80,
        num_experts=0,
        num_experts_per_tok=0,
        moe_intermediate_size=0,
        shared_expert_intermediate_size=0,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        mtp_num_layers=1,
        gate_activation="silu",
        dtype="float32",
        max_position_embeddings=1024,
        eos_token_ids=(),
        quantized=False,
    )
    return dataclasses.replace(config, **changes)


MOE = {
    "family": "qwen3_5_moe",
    "intermediate_size": 0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def randomize(module: torch.nn.Module, seed: int) -> None:
    """Fill with random weights that keep activations near 1; gates and norms are like a trained model's."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("a_log"):
            value = noise * 0.5
        elif name.endswith("dt_bias"):
            value = noise - 2.0
        elif name.endswith("mixer.norm_weight"):
            value = 1.0 + 0.1 * noise
        elif parameter.dim() == 1:
            value = 0.1 * noise
        elif name.endswith("conv_weight"):
            value = 0.5 * noise
        elif name.startswith("embed"):
            value = noise
        else:
            value = noise * 2.0 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(value)


def build_step(
    config: ModelConfig,
    mtp_step: int,
    *,
    dtype: torch.dtype = torch.float32,
    max_batch: int = 4,
    max_model_len: int = 128,
    device: str = "cpu",
    ring_step: int | None = None,
    is_poisoned: bool = True,
    synthetic_acceptance: float | None = None,
    has_forced_ids: bool = False,
    has_text: bool = False,
    formats: Formats = NO_FORMATS,
) -> Step:
    """Return a step over random weights, the same for the same config; its caches hold NaN by default."""
    place = torch.device(device)
    target = TargetModel(config, dtype, place, formats)
    randomize(target, 1)
    draft = None
    if mtp_step:
        draft = DraftModel(config, dtype, place, formats)
        randomize(draft, 2)
    blocks_each = -(-max_model_len // BLOCK_SIZE)
    drafters = choose_drafters(mtp_step, "auto" if has_text else "off")
    sizes = SlotSizes(mtp_step, max_model_len, config.hidden_size, dtype)
    step = Step(
        target,
        draft,
        KVCache(config, max_batch * blocks_each + 1, BLOCK_SIZE, dtype, place, with_draft=draft is not None),
        StateCache(config, max_batch + 2, mtp_step if ring_step is None else ring_step, dtype, place),
        SlotState(
            max_batch + 2,
            mtp_step,
            blocks_each,
            config.hidden_size,
            config.vocab_size,
            dtype,
            place,
            num_forced=max_model_len if has_forced_ids else 0,
            rows=[row for drafter in drafters for row in drafter.rows(sizes)],
        ),
        rotary_table(config, max_model_len, place),
        mtp_step,
        config.vocab_size,
        max_model_len,
        synthetic_acceptance,
        drafters=drafters,
    )
    if is_poisoned:
        poison(step)
    return step


def poison(step: Step) -> None:
    """Fill every cache and every free row with NaN, so that reading before writing shows."""
    for module in (step.kv_cache, step.state_cache):
        for buffer in module.buffers():
            buffer.fill_(float("nan"))
    step.slots.last_hidden.fill_(float("nan"))
    if step.mtp_step:
        step.slots.deferred_hidden.fill_(float("nan"))
    step.slots.drafts[1:] = 13


def admit(
    step: Step, slot: int, *, seed: int = 0, temperature: float = 0.0, blocks: int | None = None
) -> None:
    """Give `slot` its own blocks (all, or the first `blocks`) and its sampling parameters."""
    table = step.slots.block_table
    each = table.shape[1]
    # Not in order, so that a wrong table look-up shows.
    own = [1 + (slot - 1) * each + (index * 5 + slot) % each for index in range(each)]
    if len(set(own)) < each:
        own = [1 + (slot - 1) * each + index for index in reversed(range(each))]
    updates = tuple((slot, index, own[index]) for index in range(each if blocks is None else blocks))
    install(step, slot, updates, seed, temperature)


def install(
    step: Step,
    slot: int,
    updates: tuple[tuple[int, int, int], ...],
    seed: int = 0,
    temperature: float = 0.0,
) -> None:
    """Admit a request to `slot` with the given (slot, index, block) entries of its block table."""
    moves = (Release(slot), Admit(slot, SlotSampling(seed, temperature, 0, 1.0, 0.0)))
    blocks = tuple(BlockUpdate(*update) for update in updates)
    executor = Moves(step.slot_tensors, step.slots.block_table, step.kv_cache)
    executor.carry_out(StepPlan(0, "move", moves=moves, block_updates=blocks))


def prefill_rows(step: Step, slot: int, start: int, count: int) -> PrefillRows:
    """Return the rows of a prompt chunk alone in its launch: `count` rows from position `start` on."""
    prompt_chunk = torch.tensor([[start], [count], [0]], device=step.slots.pos.device)
    table = step.slots.block_table[slot : slot + 1]
    _, _, positions, kv_slots = place_prompt_chunks(
        count, tuple(prompt_chunk), table, step.kv_cache.block_size
    )
    index, (begin, length, first_row) = prompt_chunk.new_tensor([slot], dtype=torch.int32), prompt_chunk
    at = (positions, positions, kv_slots, table, index, begin)
    return PrefillRows(*at, length=length, first_row=first_row, snapshot_offset=torch.zeros_like(length))


@torch.no_grad()
def prefill(step: Step, slot: int, prompt: list[int], chunk: int = 64, chain: int | None = None) -> int:
    """Prefill a prompt in chunks and return its first token; the most possible drafts follow."""
    device = step.slots.pos.device
    index = torch.tensor([slot], dtype=torch.int32, device=device)
    for start in range(0, len(prompt), chunk):
        part = torch.tensor(prompt[start : start + chunk], device=device)
        prompt_chunks = torch.tensor([[slot], [start], [len(part)], [0], [0]], device=device)
        prefill_step(step, part, prompt_chunks)
    packed = first_token(step, index, step.mtp_step if chain is None else chain)
    return StepOutput.unpack(packed, 1)[0].tokens[0]


@torch.no_grad()
def decode(
    step: Step, slots: list[int], verify: int | None = None, chain: int | None = None
) -> list[list[int]]:
    """Run one decode round; return each slot's new tokens (padding slots are 0).

    The default depths are the largest.
    """
    depths = [step.mtp_step if depth is None else depth for depth in (verify, chain)]
    index = torch.tensor(slots, dtype=torch.int32, device=step.slots.pos.device)
    return new_tokens(step.decode(index, RoundShape(*depths)), depths[0])


@torch.no_grad()
def catch_up(step: Step, slots: list[int]) -> None:
    """Let the draft read the inputs that rounds without drafts deferred."""
    catch_up_step(step, torch.tensor(slots, dtype=torch.int32, device=step.slots.pos.device))


def new_tokens(packed: torch.Tensor, verify: int) -> list[list[int]]:
    """Return the tokens that a packed output gives each request; all must come from finite logits."""
    rows = StepOutput.unpack(packed, verify + 1)
    assert all(row.num_new == row.num_finite for row in rows)
    return [row.tokens[: row.num_new] for row in rows]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run the body with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
