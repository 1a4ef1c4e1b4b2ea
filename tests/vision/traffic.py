"""Prompts with images among text, and requests with and without images."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from compiled_mtp.engine import Engine
from compiled_mtp.frontend.image_prompts import place_images, prepare_images
from compiled_mtp.request import SamplingParams
from tests.engines import collect
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
COUNT = 14
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
