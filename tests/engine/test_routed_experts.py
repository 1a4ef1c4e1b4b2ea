"""Routed experts of a request: those of transformers' router, at any depth, batch and state of the cache."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, RoutedExperts, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of
from tests.oracle import oracle

FAMILIES: dict[str, dict[str, Any]] = {
    "moe": {"family": "qwen3_5_moe"},
    "next": {"family": "qwen3_next", "num_experts": 5},
}
LENGTHS = (1, 20, 75)
PROMPTS = [[*prompt_of(64, 7, 500), *prompt_of(length, length, 500)] for length in LENGTHS]
PARAMS = SamplingParams(max_tokens=15, temperature=0.9, seed=2, ignore_eos=True, return_routed_experts=True)


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])


def ids_of(experts: RoutedExperts | None) -> torch.Tensor:
    """Return the ids [tokens, layers, k]."""
    assert experts is not None
    values = array("h")
    values.frombytes(experts.data)
    return torch.tensor(values.tolist()).view(experts.shape)


def run(engine: Engine, prompts: list[list[int]] = PROMPTS, **changes: Any) -> list[RequestOutput]:
    outputs = engine.generate(prompts, PARAMS.model_copy(update=changes))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.routed_experts is not None
        assert output.routed_experts.shape[0] == len(prompt) + len(output.new_token_ids) - 1
    return outputs


def theirs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """Return the ids that transformers' routers choose, [tokens, layers, k]."""
    model = oracle(directory).model
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, outputs: found.append(outputs[2]))
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def test_they_are_those_of_transformers(directory: Path) -> None:
    engine = make_engine(directory, routed_experts=True, dtype="float32")
    for prompt, output in zip(PROMPTS, run(engine), strict=True):
        wanted = theirs(directory, [*prompt, *output.new_token_ids[:-1]])
        found = ids_of(output.routed_experts)
        assert found.shape == wanted.shape
        # Both sum in float32, in other orders: two nearly equal experts of a token may change places.
        assert float((found == wanted).all(-1).float().mean()) > 0.995


def test_they_do_not_depend_on_depth_batch_or_cache(directory: Path) -> None:
    plain = make_engine(directory, mtp_step=0, max_batch=1, prefix_cache=False, routed_experts=True)
    expected = [(one.new_token_ids, one.routed_experts) for one in run(plain)]
    settings: tuple[dict[str, Any], ...] = (
        {"mtp_step": 3},
        {"mtp_step": 7, "max_in_flight": 1},
        {"mtp_step": "auto", "prefill_chunk": 128},
    )
    for changes in settings:
        engine = make_engine(directory, routed_experts=True, **changes)
        for _ in range(2):  # The second time prompts resume after cached prefixes.
            assert [(one.new_token_ids, one.routed_experts) for one in run(engine)] == expected, changes
        assert engine.stats().prefix_hits > 0


def test_preempted_requests_keep_theirs(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_5_moe", hidden_size=64)
    prompts = [prompt_of(30, number, 500) for number in range(6)]
    plain = run(make_engine(directory, routed_experts=True), prompts, max_tokens=50)
    for offload_gb, how in ((0, "recomputes"), (0.1, "offloads")):
        engine = make_engine(directory, num_blocks=16, offload_gb=offload_gb, routed_experts=True)
        # Admit more requests than there are blocks for.
        engine.scheduler._planner.admission.tokens_ahead = 0
        pressed = run(engine, prompts, max_tokens=50)
        assert [one.routed_experts for one in pressed] == [one.routed_experts for one in plain]
        assert getattr(engine.stats(), how) > 0


def test_a_stop_and_log_probabilities_change_nothing(directory: Path) -> None:
    engine = make_engine(directory, mtp_step=3, routed_experts=True)
    (whole,) = run(engine, PROMPTS[1:2])
    stop = whole.new_token_ids[9]
    (cut,) = run(engine, PROMPTS[1:2], stop_token_ids=(stop,), logprobs=1)
    length = whole.new_token_ids.index(stop) + 1
    assert cut.new_token_ids == whole.new_token_ids[:length]
    found = ids_of(cut.routed_experts)
    assert torch.equal(found, ids_of(whole.routed_experts)[: len(found)])
    (silent,) = engine.generate(PROMPTS[:1], PARAMS.model_copy(update={"return_routed_experts": False}))
    assert silent.routed_experts is None


def test_random_traffic_keeps_them_apart(directory: Path) -> None:
    rng = random.Random(1)
    engine = make_engine(directory, mtp_step=3, max_batch=4, routed_experts=True)
    alone = {index: run(engine, [prompt])[0] for index, prompt in enumerate(PROMPTS)}
    outputs: dict[str, RequestOutput] = {}
    names: dict[str, int] = {}
    for number in range(8):
        names[str(number)] = index = rng.randrange(len(PROMPTS))
        engine.add_request(prompt_token_ids=PROMPTS[index], params=PARAMS, request_id=str(number))
        for _ in range(rng.randint(0, 6)):
            outputs |= {one.request_id: one for one in engine.step() if one.finish_reason is not None}
    while engine.has_unfinished_requests():
        outputs |= {one.request_id: one for one in engine.step() if one.finish_reason is not None}
    for name, index in names.items():
        assert outputs[name].routed_experts == alone[index].routed_experts


def test_mistakes_are_named(directory: Path, tmp_path: Path) -> None:
    engine = make_engine(directory)
    with pytest.raises(ValueError, match="return_routed_experts must be left out of an engine without"):
        engine.add_request(prompt_token_ids=[1], params=PARAMS)
    with pytest.raises(ValueError, match="routed_experts must be False for a model without experts, got"):
        make_engine(write_checkpoint(tmp_path), routed_experts=True)
