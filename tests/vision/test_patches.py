"""The size of a resized image, its patches, and the rotary positions of its tokens."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from compiled_mtp.model_config import VisionConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.plan import ImageSpan
from compiled_mtp.vision.images import prepare_image
from compiled_mtp.vision.patches import patchify
from compiled_mtp.vision.positions import rotary_positions
from compiled_mtp.vision.sizes import smart_resize
from tests.vision.checkpoints import VisionOracle, picture


@pytest.fixture(scope="module")
def vision(dense: Path) -> VisionConfig:
    config = read_model_config(dense, max_pixels=1 << 20).vision
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("given", "resized"),
    [
        ((32, 32), (256, 256)),
        ((100, 333), (160, 480)),
        ((640, 480), (640, 480)),
        ((1001, 333), (992, 320)),
        ((4100, 4100), (4096, 4096)),
        ((10, 2000), (32, 3648)),
    ],
)
def test_sizes_are_those_of_the_released_processor(vision, given, resized):
    released = dataclasses.replace(vision, least_pixels=65536, most_pixels=16777216)
    assert smart_resize(*given, released) == resized


def test_a_narrow_image_is_refused(vision):
    with pytest.raises(ValueError, match=r"image must have a longer side of at most 200 times .* 1 x 201"):
        smart_resize(201, 1, vision)


def test_no_image_has_more_tokens_than_are_planned(vision):
    rng = random.Random(0)
    for least, most in ((1024, 1024), (4096, 9000), (65536, 65536), (65536, 1310720)):
        config = dataclasses.replace(vision, least_pixels=least, most_pixels=most)
        for _ in range(2000):
            height = round(2 ** rng.uniform(0, 13))
            width = round(min(max(height * 2 ** rng.uniform(-7.7, 7.7), 1), 1 << 14))
            if max(height, width) > 200 * min(height, width):
                continue
            new_height, new_width = smart_resize(height, width, config)
            assert new_height * new_width // 1024 <= config.most_tokens, (height, width, config)


def test_patches_equal_those_of_the_slow_processor(vision: VisionConfig, dense_oracle: VisionOracle) -> None:
    for width, height in ((333, 100), (64, 64), (31, 250)):
        image = picture(width, height)
        made = prepare_image(image, vision)
        pixels = torch.frombuffer(bytearray(made.pixels), dtype=torch.uint8)
        shape = (made.rows * 32, made.columns * 32, 3)
        values, grid = dense_oracle.process([image])
        assert grid.tolist() == [[1, made.rows * 2, made.columns * 2]]
        assert torch.equal(patchify(pixels.view(shape), vision), values)


def test_the_order_of_a_patch(vision):
    """Row 0 is the upper left patch; row 1 is right of it, row 2 below it; row 4 begins the next block."""
    row, column = torch.meshgrid(torch.arange(32), torch.arange(64), indexing="ij")
    pixels = torch.stack((row, column, row * 0 + 255), 2).to(torch.uint8)
    plain = dataclasses.replace(vision, mean=(1e-9,) * 3, std=(1 / 255,) * 3)
    patches = patchify(pixels, plain).view(8, 3, 2, 16, 16).round()
    corners = [[0, 0], [0, 16], [16, 0], [16, 16], [0, 32], [0, 48], [16, 32], [16, 48]]
    assert patches[:, :2, 0, 0, 0].tolist() == corners
    assert torch.equal(patches[:, :, 0], patches[:, :, 1])
    assert patches[3, 0, 0, :, 5].tolist() == list(range(16, 32))
    assert patches[3, 1, 0, 5].tolist() == list(range(16, 32))
    assert bool((patches[:, 2] == 255).all())


def test_golden_positions():
    """3 of text, an image of 3 x 5 cells, 2 of text, an image of 2 x 2 cells, 3 of text."""
    images = (ImageSpan(3, 3, 5), ImageSpan(20, 2, 2))
    got = rotary_positions(images, 0, 27).tolist()
    assert got == [
        [0, 1, 2, *[3] * 15, 8, 9, *[10] * 4, 12, 13, 14],
        [0, 1, 2, *[3] * 5, *[4] * 5, *[5] * 5, 8, 9, 10, 10, 11, 11, 12, 13, 14],
        [0, 1, 2, *[3, 4, 5, 6, 7] * 3, 8, 9, 10, 11, 10, 11, 12, 13, 14],
    ]
    assert sum(image.extent - image.num_tokens for image in images) == -12
    for start in range(-1, 27):
        for end in range(max(start, 0), 28):
            seen = tuple(image for image in images if image.start < end)
            part = rotary_positions(seen, start, end)
            assert part[:, 0 - min(start, 0) :].tolist() == [row[max(start, 0) : end] for row in got]
    assert rotary_positions(images, -1, 0).tolist() == [[-1]] * 3
    assert rotary_positions((), 5, 8).tolist() == [[5, 6, 7]] * 3
