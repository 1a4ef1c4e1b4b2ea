"""Tokens of prompts with images: transformers', and the same ones whatever else the engine does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.ops.find_drafts import LEAST_THRESHOLD, cpu
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds import drafters
from compiled_mtp.runner.programs import Programs
from compiled_mtp.runner.sizes import vision_bytes
from compiled_mtp.vision.positions import rotary_positions
from tests.communicators.threads import engine_of
from tests.engines import LateCopyStream, make_engine, run_to_end
from tests.oracle import oracle
from tests.vision.checkpoints import VisionOracle, write_vision_checkpoint
from tests.vision.traffic import (
    COUNT,
    SIZES,
    add,
    check_preempted,
    check_resumed_from_host,
    decode_mixed,
    expand,
    make_prompt,
    pad_of,
    requests,
)

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def engine_with_images(directory: Path, **options: Any) -> Engine:
    return make_engine(directory, max_images=8, **options)


@cache
def plain_streams(directory: Path) -> dict[str, list[int]]:
    """Each request decoded alone, one token at a time, from its beginning."""
    engine = engine_with_images(directory, mtp_step=0, max_batch=1, prefix_cache=False, prefill_chunk=512)
    tokens: dict[str, list[int]] = {}
    for name, (prompt, params) in requests(pad_of(directory)).items():
        add(engine, name, prompt, params)
        tokens |= run_to_end(engine)
    return tokens


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_greedy_tokens_are_those_of_transformers(family: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(family)
    reference: VisionOracle = request.getfixturevalue(f"{family}_oracle")
    engines = [engine_with_images(directory, mtp_step=depth) for depth in (0, 3)]
    for sizes in (SIZES[1], SIZES[2], SIZES[4]):
        prompt = make_prompt(sizes, len(sizes), pad_of(directory))
        want = reference.greedy(expand(engines[0], prompt), prompt[1], GREEDY.max_tokens)
        for engine in engines:
            add(engine, "a", prompt, GREEDY)
            assert run_to_end(engine)["a"] == want
            # No chunk of 64 tokens holds an image of 30 cells and the text around it.
            assert engine.runner.programs.lengths[-1] == 64


@pytest.mark.parametrize(
    ("mtp_step", "options"),
    [
        (0, {"max_in_flight": 1}),
        (1, {"prefill_chunk": 128}),
        (3, {"max_in_flight": 1, "prefill_chunk": 512}),
        (3, {"prefix_cache": False}),
        (3, {"lookup": "auto"}),
        (7, {"max_batch": 2}),
        ("auto", {"mtp_depths": (0, 2), "max_in_flight": 1}),
    ],
)
def test_mixed_traffic(dense: Path, mtp_step: Any, options: dict[str, Any]) -> None:
    engine = engine_with_images(dense, mtp_step=mtp_step, **options)
    assert decode_mixed(engine, 1) == plain_streams(dense)


def test_drafts_from_texts_with_images(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pads of images are neither matched nor drafted, and the text on both sides of an image is."""
    monkeypatch.setattr(drafters, "FIRST_THRESHOLD", LEAST_THRESHOLD)
    monkeypatch.setattr(cpu, "RISE", 0)
    params = SamplingParams(max_tokens=24, seed=5, ignore_eos=True, logprobs=1, allowed_token_ids=[5, 6])
    prompts = {str(n): make_prompt(SIZES[n], n, pad_of(dense), least_text=3) for n in (1, 2, 5)}
    found = []
    for options in ({"mtp_step": 0, "max_batch": 1}, {"lookup": "auto", "max_batch": 1}, {"lookup": "auto"}):
        engine = engine_with_images(dense, **options)
        made: dict[str, list[Any]] = {name: [] for name in prompts}
        for name, (ids, images) in prompts.items():
            add(engine, name, ([5, 6, 5, 6, *ids, 6, 5, 6], images), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                made[output.request_id] += zip(output.new_token_ids, output.logprobs or (), strict=True)
        found.append(made)
    assert found[0] == found[1] == found[2]
    assert engine.stats().speculation.lookup_accepted > 0
    text = engine.runner.step.slots.token_ids
    assert text is not None
    assert (text < 0).any()


def test_mixed_traffic_of_experts(moe: Path) -> None:
    assert decode_mixed(engine_with_images(moe), 2) == plain_streams(moe)


@pytest.mark.parametrize("offload_gb", [0, None])
def test_preempted_requests(dense: Path, offload_gb: float | None) -> None:
    """Requests are recomputed, or offloaded to a host tier whose copies end late."""
    sizes = {"num_blocks": 19, "max_batch": 6, "lookup": "off"}
    engine = engine_with_images(dense, offload_gb=offload_gb, **sizes)
    engine.scheduler._planner.admission.tokens_ahead = -40
    if offload_gb is None:
        device = torch.device("cpu")
        engine.runner.moves._copy_streams["host"] = LateCopyStream(device)
    assert decode_mixed(engine, 3) == plain_streams(dense)
    stats = engine.stats()
    assert (stats.recomputes if offload_gb == 0 else stats.offloads) > 2


def test_a_launch_that_fails_before_the_first_chunk_of_a_prompt_frees_its_features(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next plan frees every slot that no plan is known to have installed: the image is encoded again."""
    pad, prompt = pad_of(dense), make_prompt(((64, 64),), 2, pad_of(dense))
    engine = engine_with_images(dense, mtp_step=1)
    add(engine, "alone", prompt, GREEDY)
    wanted = run_to_end(engine)["alone"]
    engine = engine_with_images(dense, mtp_step=1)
    assert engine.runner.encoder is not None
    add(engine, "text", make_prompt((), 1, pad), GREEDY)
    for _ in range(3):
        engine.step()
    add(engine, "image", prompt, GREEDY)
    while not engine.stats().images:
        engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.programs, "decode", fail)
        (ended,) = engine.step()
    assert (ended.request_id, ended.finish_reason) == ("text", "error")
    assert run_to_end(engine) == {"image": wanted}
    assert engine.stats().images == 2
    assert engine.runner.encoder.num_held == 0


def test_log_probabilities_are_the_same_bits_beside_others(dense: Path) -> None:
    """A request with an image and one without, each alone and both together, and their prompts' as well."""
    pad, found = pad_of(dense), list[dict[str, Any]]()
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    prompts = {"image": make_prompt(SIZES[1], 1, pad), "text": make_prompt((), 3, pad)}
    for together in (["image"], ["text"], ["text", "image"]):
        engine = engine_with_images(dense, mtp_step=3 if len(together) == 2 else 0)
        outputs: dict[str, list[Any]] = {name: [] for name in together}
        for name in together:
            add(engine, name, prompts[name], params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id].append((output.logprobs, output.prompt_logprobs))
        found.append({})
        for name, parts in outputs.items():
            entries = [entry for logprobs, _ in parts for entry in logprobs or ()]
            of_prompt = [one for _, one in parts if one is not None]
            assert (len(entries), len(of_prompt)) == (8, 1)
            found[-1][name] = (entries, of_prompt)
    assert found[0] | found[1] == found[2]


def test_rounds_go_on_between_the_slices_of_the_tower(dense: Path) -> None:
    engine = engine_with_images(dense)
    object.__setattr__(engine.scheduler.limits.tower, "most", 1)
    add(engine, "text", make_prompt((), 1, pad_of(dense)), GREEDY)
    for _ in range(3):
        engine.step()
    kinds, run = list[str](), engine.runner.run

    def spy(plan: Any) -> Any:
        kinds.append(plan.kind)
        return run(plan)

    engine.runner.run = spy  # type: ignore[method-assign]
    prompt = make_prompt(((64, 64), (96, 64)), 2, pad_of(dense), most_text=5)
    add(engine, "image", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    run_to_end(engine)
    # Two images in slices of one of two layers, then the whole prompt.
    assert kinds[:10] == ["encode", "decode"] * 4 + ["prefill", "decode"]


def test_the_plan_counts_what_images_take(dense: Path) -> None:
    with_images = engine_with_images(dense, max_pixels=65536).runner
    plain = make_engine(dense).runner
    more = with_images.memory.other_bytes - plain.memory.other_bytes
    assert more == vision_bytes(with_images.spec) > 0
    inputs = with_images.programs.images
    assert inputs is not None
    assert sum(tensor.nbytes for tensor in inputs.of(64)) < more


def test_captured_programs_get_the_tensors_of_their_capture(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With capture replaced by the check of a replay: prompts with images, and their first tokens."""
    num_replayed = 0

    def capture(program: Any, inputs: Any, pool: Any) -> Any:
        def replay(*arguments: Any) -> Any:
            nonlocal num_replayed
            num_replayed += 1
            assert all(given is static for given, static in zip(arguments, inputs, strict=True))
            return program(*inputs)

        return replay

    monkeypatch.setattr("compiled_mtp.runner.program_maker.capture", capture)
    engine = engine_with_images(dense, mtp_step=1, max_batch=2)
    runner = engine.runner
    runner.programs = Programs(
        runner.step,
        runner.programs.buckets,
        64,
        is_compiled=False,
        graph_mode="replay",
        encoder=runner.encoder,
    )
    runner.programs.warm_up()
    streams = plain_streams(dense)
    for name in ("1-0.0", "2-0.8", "3-0.0"):
        add(engine, name, *requests(pad_of(dense))[name])
    assert run_to_end(engine) == {name: streams[name] for name in ("1-0.0", "2-0.8", "3-0.0")}
    assert num_replayed > 10


def test_ranks(dense: Path) -> None:
    with engine_of(dense, 2, max_images=8, max_model_len=512, num_blocks=80) as engine:
        assert decode_mixed(engine, 4) == plain_streams(dense)


def test_an_engine_that_has_slept_sees_the_same(dense: Path) -> None:
    engine, found = engine_with_images(dense, mtp_step=1), list[list[int]]()
    prompt = make_prompt(SIZES[1], 1, pad_of(dense))
    for _ in range(2):
        add(engine, "a", prompt, GREEDY)
        found.append(run_to_end(engine)["a"])
        engine.sleep()
        assert engine.runner.encoder is None
        engine.wake_up()
    assert found[0] == found[1]
    assert engine.stats().images == 2


def test_new_weights_of_an_engine_with_images(dense: Path, tmp_path: Path) -> None:
    """From a directory, awake and asleep: text and images as in a new engine; the towers are equal."""
    other = write_vision_checkpoint(tmp_path, seed=1)
    prompt, expected = make_prompt(SIZES[1], 1, pad_of(dense)), list[list[int]]()
    for path in (dense, other):
        fresh = engine_with_images(path, mtp_step=0)
        add(fresh, "a", prompt, GREEDY)
        expected.append(run_to_end(fresh)["a"])
    engine = engine_with_images(dense, mtp_step=1)

    def tokens() -> list[int]:
        add(engine, "a", prompt, GREEDY)
        return run_to_end(engine)["a"]

    # As a trainer saves a model: an update reads nothing of images.
    (other / "preprocessor_config.json").unlink()
    engine.update_weights(other)
    assert tokens() == expected[1] != expected[0]
    engine.sleep()
    engine.wake_up(dense)
    assert tokens() == expected[0]


def test_statistics_count_images_apart(dense: Path) -> None:
    engine = engine_with_images(dense)
    for name in ("0-0.0", "2-0.0"):
        add(engine, name, *requests(pad_of(dense))[name])
        run_to_end(engine)
    stats = engine.stats()
    assert (stats.images, stats.image_tokens) == (2, 4 + 90)
    assert stats.image_speculation is not None
    assert 0 < stats.image_speculation.rounds < stats.speculation.rounds
    assert stats.image_speculation.round_tokens == COUNT - 1


def test_a_request_without_images_decodes_as_without_the_tower(dense: Path) -> None:
    text = make_engine(dense, mtp_step=3)
    streams = plain_streams(dense)
    for name, (prompt, params) in requests(pad_of(dense)).items():
        if not prompt[1]:
            add(text, name, prompt, params)
            assert run_to_end(text)[name] == streams[name]
    assert text.runner.encoder is None


def test_the_same_image_resumes_and_another_does_not(dense: Path) -> None:
    engine = engine_with_images(dense, prefill_chunk=64)
    pad = pad_of(dense)
    ids, images = make_prompt(((300, 300),), 5, pad, least_text=20)
    _, others = make_prompt(((300, 300),), 6, pad, least_text=20)
    whole = expand(engine, (ids, images))
    start = whole.index(pad)
    assert start < 64 < start + 81 < len(whole)
    # Later chunks of equal tokens follow an image of another shape: 9 x 9 cells, then 3 x 27.
    wide = [images[0].resize((864, 96))]
    outputs = []
    for used in (images, others, images, others, wide, wide):
        outputs.append(_decode(engine, ids, used))
    tokens, cached = zip(*outputs, strict=True)
    assert (tokens[2], tokens[3], tokens[5]) == (tokens[0], tokens[1], tokens[4])
    assert len({tuple(one) for one in tokens}) == 3
    last = (len(whole) - 1) // 64 * 64
    assert cached == (0, 0, last, last, 0, last)


@pytest.mark.parametrize(("mtp_step", "max_in_flight"), [(0, 0), (3, 1)])
def test_prompts_with_images_come_back_from_host_memory(
    dense: Path, monkeypatch: pytest.MonkeyPatch, mtp_step: int, max_in_flight: int
) -> None:
    plain = engine_with_images(dense, mtp_step=0, prefix_cache=False)
    monkeypatch.setattr("compiled_mtp.runner.host_tiers.prefix_tier_bytes", lambda *_: 1 << 24)
    if max_in_flight:
        monkeypatch.setattr("compiled_mtp.cache.moves.CopyStream", LateCopyStream)
    sizes: dict[str, Any] = {"max_model_len": 256, "num_blocks": 17, "max_batch": 2}
    engine = engine_with_images(dense, mtp_step=mtp_step, max_in_flight=max_in_flight, **sizes)
    check_resumed_from_host(engine, plain)


def _decode(engine: Engine, ids: list[int], images: list[Any]) -> tuple[list[int], int]:
    engine.add_request(prompt_token_ids=ids, images=images, params=GREEDY, request_id="a")
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.new_token_ids
            cached = output.metrics.cached_tokens
    return tokens, cached


@pytest.mark.parametrize("most", [1, None])
def test_features_of_a_replayed_prompt_are_the_same_bits(dense: Path, most: int | None) -> None:
    alone = engine_with_images(dense, mtp_step=0)
    engine = engine_with_images(dense, offload_gb=0, prefix_cache=False, max_in_flight=0)
    if most is not None:
        object.__setattr__(engine.scheduler.limits.tower, "most", most)
    check_preempted(engine, alone)
    assert (engine.stats().recomputes, engine.stats().offloads) == (2, 0)


@torch.no_grad()
def test_draft_logits_are_those_of_a_head_with_features(dense: Path, dense_oracle: VisionOracle) -> None:
    """The MTP head of transformers on (feature or embedding of token j, hidden j - 1), one position after
    token j - 1 on each axis."""
    pad = pad_of(dense)
    prompt = make_prompt(SIZES[2], 2, pad, least_text=3)
    engine = engine_with_images(dense, mtp_step=1)
    ids = expand(engine, prompt)
    step, drafted = engine.runner.step, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
    run = step.draft_forward

    def spy(token_ids: Any, hidden: Any, rows: Any, kept_rows: Any = None) -> torch.Tensor:
        made = run(token_ids, hidden, rows, kept_rows)
        if hasattr(rows, "first_row"):
            count = int(rows.length[0])
            drafted.append((hidden[:count], made[:count], rows.rotary_positions[:, :count].clone()))
        return made

    step.draft_forward = spy  # type: ignore[method-assign]
    add(engine, "a", prompt, GREEDY)
    run_to_end(engine)
    hidden, got = (torch.cat([parts[i] for parts in drafted]) for i in range(2))
    positions = torch.cat([parts[2] for parts in drafted], 1)

    model = dense_oracle.model.model
    embeddings = model.get_input_embeddings()(torch.tensor(ids))
    is_pad = torch.tensor(ids) == pad
    embeddings[is_pad] = torch.cat([dense_oracle.features(image) for image in prompt[1]])
    given = {"prompt": None, "prompt_token_ids": prompt[0], "messages": None, "images": prompt[1]}
    spans = [image.span for image in engine.frontend.make_request("", GREEDY, **given)[0].images]
    want_positions = rotary_positions(spans, -1, len(ids) - 1) + 1
    assert torch.equal(positions, want_positions)
    assert not torch.equal(positions[1], rotary_positions(spans, 0, len(ids))[1])

    mtp = oracle(dense).mtp
    assert mtp is not None
    # Slot 0 has no hidden state before it: the head begins at token 1.
    inputs, before = embeddings[None, 1:], hidden[None, 1:]
    angles = mtp.rotary_emb(inputs, want_positions[:, None, 1:])
    mask = torch.full((len(ids) - 1,) * 2, float("-inf")).triu(1)[None, None]
    how = {"attention_mask": mask, "position_ids": None, "cache": None}
    want = mtp.layers[0](inputs, before, position_embeddings=angles, **how)
    want = want if not mtp.use_shared_post_norm else mtp.shared_post_norm(want)
    head = dense_oracle.model.lm_head
    difference = head(got[1:]) - head(want[0])
    assert float(difference.abs().max()) < 1e-3 * float(head(want[0]).abs().max())
    # Embeddings of the pads, or the target's positions, would give others.
    plain = model.get_input_embeddings()(torch.tensor(ids))[None, 1:]
    target = mtp.rotary_emb(inputs, rotary_positions(spans, 0, len(ids))[:, None, 1:])
    for other in (
        mtp.layers[0](plain, before, position_embeddings=angles, **how),
        mtp.layers[0](inputs, before, position_embeddings=target, **how),
    ):
        assert float((head(got[1:]) - head(other[0])).abs().max()) > 0.1


def test_tokens_of_images_are_not_looked_up(dense: Path) -> None:
    engine = engine_with_images(dense, lookup="auto", max_batch=1)
    pad = pad_of(dense)
    prompt = make_prompt(SIZES[1], 1, pad)
    add(engine, "image", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    run_to_end(engine)
    ids, expanded = engine.runner.step.slots.token_ids, expand(engine, prompt)
    assert ids is not None
    assert ids[1, : len(expanded)].tolist() == [-1 if token == pad else token for token in expanded]
