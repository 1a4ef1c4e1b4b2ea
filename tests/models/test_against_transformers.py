"""transformers is the oracle for the model: every family, prefill in chunks, cached decode, MTP head."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from compiled_mtp.config import EngineConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.rounds.first_token import rows_at
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from tests import tiny
from tests.checkpoints import FAMILIES, FP8_FAMILIES, ROPE_FAMILIES, write_checkpoint
from tests.oracle import Oracle, oracle

PROMPT_LEN, DECODE_LEN, CHUNK = 150, 12, 64
# The errors listed in model.md change logits of scale 4.5 by 0.05 to 6.6: at least a hundred times this.
TOLERANCE = 5e-4


class InFloat64(TorchFunctionMode):
    """Keeps a model in float64 where its code asks for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func.__name__ in ("grouped_mm", "_grouped_mm"):  # There is no such operator for float64.
            ends = kwargs["offs"].tolist()
            groups = zip([0, *ends], ends, args[1], strict=False)
            return torch.cat([args[0][begin:end] @ weight for begin, end, weight in groups])
        wide = {torch.float32: torch.float64}
        args = tuple([wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args])
        kwargs = {k: wide.get(v, v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


@dataclass
class Case:
    """exact: transformers in float64. own_error: the distance of transformers' float32 logits from it."""

    name: str
    runner: Runner
    oracle: Oracle
    exact: Oracle
    tokens: torch.Tensor
    hidden: torch.Tensor
    exact_logits: torch.Tensor
    own_error: float


# FP8 weights that stay FP8, as on a GPU; here the references dequantise them at every call.
KEPT = [(f"{name}-kept", options | {"hidden_size": 128}) for name, options in FP8_FAMILIES]


@pytest.fixture(scope="module", params=FAMILIES + ROPE_FAMILIES + KEPT, ids=lambda family: family[0])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, options = request.param
    directory = tmp_path_factory.mktemp(name)
    write_checkpoint(directory, **options)
    model = read_model_config(directory)
    # transformers dequantises the weights and does not quantise rows.
    recipe = "w8a16" if model.quantized else "auto"
    config = EngineConfig(
        model=directory, device="cpu", mtp_step=3, max_batch=2, max_model_len=256, weight_recipe=recipe
    )
    with pytest.MonkeyPatch.context() as patch:
        if name.endswith("-kept"):
            patch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: True)
        runner = Runner(resolve(config, model, model.vocab_size))
    assert bool(runner.spec.weight_formats) == name.endswith("-kept")
    reference = oracle(directory)
    tokens = torch.randint(0, model.vocab_size, (PROMPT_LEN + DECODE_LEN,))
    hidden, logits = reference.target(tokens)
    exact = deepcopy(reference)
    for model_of in (exact.model, exact.mtp):
        model_of.double()
    with InFloat64():
        exact_logits = exact.target(tokens)[1]
    assert exact_logits.dtype == torch.float64
    return Case(name, runner, reference, exact, tokens, hidden, exact_logits, distance(logits, exact_logits))


def distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).abs().max())


def check(case: Case, what: str, error: float, own_error: float) -> None:
    """Check that our float32 logits are at most twice as far from float64 as transformers' are."""
    print(f"{case.name} {what}: error {error:.2e}, that of transformers in float32 {own_error:.2e}")
    assert error < TOLERANCE
    assert error < 2 * own_error


@torch.no_grad()
def test_prefill_and_cached_decode_logits(case: Case) -> None:
    step, slots = case.runner.step, case.runner.step.slots
    tiny.poison(step)
    own = tuple((1, index, index + 1) for index in range(slots.block_table.shape[1]))
    tiny.install(step, 1, own)
    state_index = torch.tensor([1], dtype=torch.int32)
    index = state_index.long()
    ours = []
    for begin in range(0, PROMPT_LEN, CHUNK):
        part = case.tokens[begin : min(begin + CHUNK, PROMPT_LEN)]
        rows = tiny.prefill_rows(step, 1, begin, len(part))
        hidden = step.target(part, rows, step.kv_cache, step.state_cache, step.cos_sin)
        ours.append(step.target.logits(hidden))
    check(case, "prefill", distance(torch.cat(ours), case.exact_logits[:PROMPT_LEN]), case.own_error)

    base = pos = PROMPT_LEN
    decoded = []
    # Windows of 1 to 3 rows, so that folds of several ring entries are read too.
    for window in (1, 2, 3, 1, 3, 2):
        rows = rows_at(step, state_index, index, torch.tensor([pos]), window, torch.tensor([base]))
        part = case.tokens[pos : pos + window]
        hidden = step.target(part, rows, step.kv_cache, step.state_cache, step.cos_sin)
        decoded.append(step.target.logits(hidden))
        base, pos = pos, pos + window
    assert pos == PROMPT_LEN + DECODE_LEN
    check(case, "decode", distance(torch.cat(decoded), case.exact_logits[PROMPT_LEN:]), case.own_error)


@torch.no_grad()
def test_mtp_logits_and_a_chain_of_three(case: Case) -> None:
    if case.oracle.mtp is None:
        pytest.fail("every family of the list carries an MTP head")
    step, slots = case.runner.step, case.runner.step.slots
    tiny.poison(step)
    tiny.install(step, 1, tuple((1, i, i + 1) for i in range(slots.block_table.shape[1])))
    state_index = torch.tensor([1], dtype=torch.int32)
    index = state_index.long()
    # Pairs (token j, hidden j - 1) for j = 1 .. PROMPT_LEN - 1, then a chain on the draft's own hidden
    # states.
    tokens, before = case.tokens[1:PROMPT_LEN], case.hidden[: PROMPT_LEN - 1]
    theirs = draft_chain(case.oracle.draft, case.tokens, before)
    with InFloat64():
        exact = draft_chain(case.exact.draft, case.tokens, before.double())
    rows = tiny.prefill_rows(step, 1, 1, PROMPT_LEN - 1)
    hidden = step.draft_forward(tokens, before, rows)
    ours = [step.target.logits(hidden)]
    for position in range(PROMPT_LEN, PROMPT_LEN + 3):
        token = case.tokens[position : position + 1]
        rows = rows_at(step, state_index, index, torch.tensor([position]), 1, torch.tensor([position]))
        hidden = step.draft_forward(token, hidden[-1:], rows)
        ours.append(step.target.logits(hidden))
    own_error = distance(theirs, exact)
    check(case, "mtp", distance(ours[0], exact[:-3]), own_error)
    check(case, "mtp chain", distance(torch.cat(ours[1:]), exact[-3:]), own_error)


def draft_chain(draft: Callable[..., Any], tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the oracle's MTP logits of the prompt's pairs, and of three more on its own hidden states."""
    hidden, logits, cache = draft(tokens[1:PROMPT_LEN], before)
    rows = [logits]
    for position in range(PROMPT_LEN, PROMPT_LEN + 3):
        hidden, logits, cache = draft(tokens[position : position + 1], hidden[-1:], cache, position)
        rows.append(logits)
    return torch.cat(rows)


@torch.no_grad()
def test_greedy_tokens_past_a_key_split(case: Case) -> None:
    step = case.runner.step
    tiny.poison(step)
    tiny.install(step, 1, tuple((1, i, i + 1) for i in range(step.slots.block_table.shape[1])))
    prompt = case.tokens[:110].tolist()
    out = [tiny.prefill(step, 1, prompt, CHUNK)]
    while len(out) < 32:
        out += tiny.decode(step, [1])[0]
    logits = case.oracle.target(torch.tensor(prompt + out))[1][len(prompt) - 1 : len(prompt) + 31]
    best = logits.topk(2).values
    is_clear = best[:, 0] - best[:, 1] >= 1e-3
    assert is_clear.sum() >= 30
    assert torch.equal(logits.argmax(-1)[is_clear], torch.tensor(out[:32])[is_clear])
