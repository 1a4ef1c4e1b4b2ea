"""Prompts with images among text, and requests with and without images."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from compiled_mtp.engine import Engine
from compiled_mtp.frontend.image_prompts import place_images, prepare_images
from compiled_mtp.request import SamplingParams
from compiled_mtp.vision.tower import Passage
from tests.engines import collect, run_to_end
from tests.vision.checkpoints import picture

# Image sizes of each request of the traffic: one to thirty cells, up to five images.
SIZES: tuple[tuple[tuple[int, int], ...], ...] = (
    (),
    ((333, 100),),
    ((64, 64), (320, 290)),
    (),
    ((32, 32), (100, 200), (65, 33), (310, 97), (160, 160)),
    ((380, 390),),
)
COUNT = 11
Prompt = tuple[list[int], list[Image.Image]]


def make_prompt(
    sizes: Sequence[tuple[int, int]], seed: int, pad: int, *, most_text: int = 40, least_text: int = 0
) -> Prompt:
    """Return ids with one pad for each image, with text before, between and after, and the images."""
    rng = random.Random(seed)
    ids, images = [], []
    for number, (width, height) in enumerate(sizes):
        ids += [rng.randrange(300) for _ in range(rng.randint(least_text, most_text))]
        ids += [pad - 2, pad, pad - 1]
        images.append(picture(width, height, seed * 10 + number))
    return ids + [rng.randrange(300) for _ in range(9)], images


def expand(engine: Engine, prompt: Prompt) -> list[int]:
    """Return the ids with all pads of every image."""
    vision = engine.model_config.vision
    assert vision is not None
    return place_images(prompt[0], prepare_images(prompt[1], vision, 8), vision)[0]


def requests(pad: int) -> dict[str, tuple[Prompt, SamplingParams]]:
    """Return the traffic: a greedy and a seeded request for each of SIZES."""
    made = {}
    for index, sizes in enumerate(SIZES):
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                max_tokens=COUNT, temperature=temperature, seed=index, ignore_eos=True, top_k=40
            )
            made[f"{index}-{temperature}"] = (make_prompt(sizes, index, pad), params)
    return made


def add(engine: Engine, name: str, prompt: Prompt, params: SamplingParams) -> None:
    """Queue a request; without images it has none."""
    engine.add_request(prompt_token_ids=prompt[0], images=prompt[1] or None, params=params, request_id=name)


def pad_of(directory: Path) -> int:
    """The id of the image pad of a checkpoint of `write_vision_checkpoint`."""
    pad: int = json.loads((directory / "config.json").read_text())["image_token_id"]
    return pad


def decode_mixed(engine: Engine, seed: int) -> dict[str, list[int]]:
    """Run the traffic together; requests are added at random moments."""
    rng, tokens = random.Random(seed), dict[str, list[int]]()
    assert engine.model_config.vision is not None
    waiting = list(requests(engine.model_config.vision.image_token_id).items())
    rng.shuffle(waiting)
    while waiting or engine.has_unfinished_requests():
        while waiting and (rng.random() < 0.3 or not engine.has_unfinished_requests()):
            name, (prompt, params) = waiting.pop()
            add(engine, name, prompt, params)
        collect(tokens, engine.step())
        engine.scheduler.check_integrity()
    assert engine.stats().blocks_used == 0
    assert engine.runner.encoder is not None
    assert engine.runner.encoder.num_held == 0
    return tokens


def check_resumed_from_host(engine: Engine, plain: Engine) -> None:
    """Decode prompts with images whose prefixes do not fit the device together, over and over.

    The engine's host tier holds them. A prefix of 128 tokens ends inside the second of two images: that one
    is encoded again, and the first is not.
    """
    assert engine.model_config.vision is not None
    pad, rng = engine.model_config.vision.image_token_id, random.Random(5)
    params = SamplingParams(max_tokens=COUNT, temperature=0.8, seed=3, ignore_eos=True)

    def text(count: int) -> list[int]:
        return [rng.randrange(300) for _ in range(count)]

    prompts = [
        ([*text(20), pad, *text(14), pad, *text(10)], [picture(288, 288, seed), picture(320, 192, seed + 9)])
        for seed in range(3)
    ]

    def decode(engine: Engine, prompt: Prompt) -> tuple[list[int], int, int]:
        before = engine.stats().images
        add(engine, "a", prompt, params)
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens += output.new_token_ids
                cached = output.metrics.cached_tokens
        engine.scheduler.check_integrity()
        return tokens, cached, engine.stats().images - before

    want = [decode(plain, prompt)[0] for prompt in prompts]
    assert len(set(map(tuple, want))) == 3
    for turn in range(3):
        found = [decode(engine, prompt) for prompt in prompts]
        assert [tokens for tokens, _, _ in found] == want
        counts = [(cached, images) for _, cached, images in found]
        assert counts == [(128, 1) if turn else (0, 2)] * 3
    stats = engine.stats()
    assert 3 <= stats.prefix_host_hits <= stats.prefix_hits
    assert stats.prefix_evictions > 0
    assert engine.runner.encoder is not None
    assert engine.runner.encoder.num_held == 0


def check_preempted(engine: Engine, alone: Engine) -> None:
    """Preempt a request with two images, once in the tower and once while it decodes, beside other streams.

    A recomputed one has its images encoded again, to the same bits, with a dirty allocator.
    """
    assert engine.model_config.vision is not None
    pad = engine.model_config.vision.image_token_id
    prompt, params = make_prompt(SIZES[2], 2, pad), SamplingParams(max_tokens=16, temperature=0.0)
    params = params.model_copy(update={"ignore_eos": True})
    wanted = watch_features(alone)
    add(alone, "a", prompt, params)
    tokens = run_to_end(alone)["a"]
    kept, found = watch_features(engine), dict[str, list[int]]()
    for index in range(3):
        add(engine, f"t{index}", make_prompt((), index, pad), params)
    for _ in range(4):
        collect(found, engine.step())
    add(engine, "a", prompt, params)
    for wait in (lambda: engine.stats().images, lambda: found.get("a", ())[4:]):
        while not wait():
            collect(found, engine.step())
        make_dirt(engine.runner.spec.device)
        engine.scheduler._planner._preempt(engine.scheduler._live.choices["a"][0])
    for name, new in run_to_end(engine).items():
        found.setdefault(name, []).extend(new)
    assert found["a"] == tokens
    # One of the two, then both, and both again if the request was not offloaded.
    again = [] if engine.stats().offloads else wanted
    assert len(wanted) == 2
    assert len(kept) == 3 + len(again)
    for features, want in zip(kept, [wanted[0], *wanted, *again], strict=True):
        assert torch.equal(features, want)


def make_dirt(device: torch.device) -> None:
    """Fill memory that the allocator gives out next with NaN."""
    dirt = [torch.full((1 << size,), float("nan"), device=device) for size in (12, 16, 20, 24)]
    del dirt


def watch_features(engine: Engine) -> list[torch.Tensor]:
    """Return a list that gains the features of every image that is encoded."""
    kept: list[torch.Tensor] = []
    assert engine.runner.encoder is not None
    tower = engine.runner.encoder.tower
    merge = tower.merge

    def spy(passage: Passage) -> torch.Tensor:
        kept.append(merge(passage))
        return kept[-1]

    tower.merge = spy  # type: ignore[method-assign]
    return kept
