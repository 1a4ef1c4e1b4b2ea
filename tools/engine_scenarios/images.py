"""How soon the first token after an image comes, and how long the rounds of other streams wait for it.

    python tools/bench_engine.py images --shape 27b --graph-mode uncompiled --image 1024x1024,3840x2160
    python tools/bench_engine.py images --shape tiny --image 96x64 --device cpu

A shape has random weights and a tower of its released size. Each image comes among text, first with nothing
else, then while --streams streams decode; another thread adds it then, as AsyncEngine does. Tokens must be
the same both times, and with mtp_step 0. A row has the image's tokens and slices of the tower; seconds to the
first token alone, of that the time of decoding and resizing and the tower's, and the time of as much text;
the longest slice; the median time between a stream's outputs without a new request, and the longest time
while the image comes, and while the text comes; and the median time of a round after the image and after the
text, alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import threading
import time
from typing import Any

import torch
from PIL import Image

from compiled_mtp import Engine, SamplingParams
from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.plan import EncodeSlice, ImageSpan
from compiled_mtp.terminal.flags import count
from compiled_mtp.vision.images import PreparedImage, prepare_image
from engine_scenarios import common

# Depth, width, heads and inner width of the towers of released shapes.
TOWERS = {
    "tiny": (2, 64, 2, 96),
    "0.8b": (12, 768, 12, 3072),
    "4b": (24, 1024, 16, 4096),
    "9b": (27, 1152, 16, 4304),
    "27b": (27, 1152, 16, 4304),
    "35b-a3b": (27, 1152, 16, 4304),
}
# Text before and after an image.
_TEXT = 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.add_argument("--image", default="1024x1024", help="sizes, WIDTHxHEIGHT, separated by commas")
    parser.add_argument("--streams", type=count, default=4, help="streams that decode meanwhile")
    parser.add_argument("--max-tokens", type=count, default=64)
    parser.add_argument("--repeats", type=count, default=3)


def vision_of(shape: str, hidden_size: int, vocab_size: int, most_pixels: int) -> VisionConfig:
    """Return the tower of a released shape; images keep their sizes, rounded to cells."""
    depth, width, heads, inner = TOWERS[shape]
    return VisionConfig(
        depth=depth,
        hidden_size=width,
        num_heads=heads,
        intermediate_size=inner,
        out_hidden_size=hidden_size,
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        side=48,
        image_token_id=vocab_size - 2,
        video_token_id=vocab_size - 1,
        mrope_section=(11, 11, 10),
        least_pixels=1024,
        most_pixels=most_pixels,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def open_engine(flags: argparse.Namespace, sizes: list[tuple[int, int]], **given: Any) -> Engine:
    """Return an engine of the shape with its tower."""
    most = max(width * height for width, height in sizes) + 1024 * 512
    longest = most // 1024 + 2 * _TEXT + 2 * flags.max_tokens + 64
    config = EngineConfig(
        **common.settings(flags)
        | {"max_images": 1, "max_batch": flags.streams + 1, "max_model_len": longest},
        prefix_cache=False,
        **given,
    )
    model = common.shape_config(flags.shape, is_fp8=flags.fp8)
    vision = vision_of(flags.shape, model.hidden_size, model.vocab_size, most)
    model = dataclasses.replace(model, vision=vision)
    frontend = RequestProcessor(flags.model, model, None, longest, max_images=1)
    return Engine(config, frontend=frontend, fill=common.fill_same)


def decode(engine: Engine, request_id: str, given: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Decode one request alone: its tokens, the seconds to the first and the time of each later round."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    begin = last = time.perf_counter()
    engine.add_request(params=params, request_id=request_id, **given)
    tokens, rounds = list[int](), list[float]()
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter()
            if output.new_token_ids:
                rounds.append(now - last)
                last = now
            tokens += output.new_token_ids
    return {"tokens": tokens, "first_s": last - begin - sum(rounds[1:]), "rounds_s": rounds[1:]}


def decode_beside(engine: Engine, request_id: str, given: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Decode one request beside endless streams: its tokens, the seconds to the first, and the longest time
    between outputs of the streams until then."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    adding = threading.Thread(
        target=engine.add_request, kwargs={"params": params, "request_id": request_id, **given}
    )
    begin = last = time.perf_counter()
    waits, tokens, first, is_done = list[float](), list[int](), 0.0, False
    adding.start()
    while not is_done:
        outputs = engine.step()
        now = time.perf_counter()
        own = [output for output in outputs if output.request_id == request_id]
        # The last wait ends after the first token: the chunk that gave it came before the round.
        if len(own) < len(outputs) and (not first or last < first):
            waits.append(now - last)
            last = now
        for output in own:
            first = first or now
            tokens += output.new_token_ids
            is_done = output.finish_reason is not None
    adding.join()
    return {"tokens": tokens, "first_s": first - begin, "longest_s": max(waits)}


def time_slices(engine: Engine, image: PreparedImage) -> list[float]:
    """Seconds of each slice of the tower for an image, the upload and the merger included."""
    encoder, cost = engine.runner.encoder, engine.scheduler.limits.tower
    assert encoder is not None
    assert cost is not None
    span = ImageSpan(0, image.rows, image.columns)
    count, size = cost.count_parts(span.num_tokens), cost.slice_parts(span.num_tokens)
    runs = []
    for _ in range(3):
        times = []
        for first in range(0, count, size):
            end = min(first + size, count)
            part = EncodeSlice(0, span, first, end, end == count, b"" if first else image.pixels)
            begin = time.perf_counter()
            encoder.encode(0, part)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        encoder.clear()
        runs.append(times)
    return min(runs, key=sum)


def measure(
    flags: argparse.Namespace, engine: Engine, plain: Engine, size: tuple[int, int]
) -> dict[str, Any]:
    """Return the row of one image."""
    model, tower = engine.model_config, engine.scheduler.limits.tower
    assert model.vision is not None
    assert tower is not None
    rng = random.Random(0)
    image = Image.frombytes("RGB", (8, 8), rng.randbytes(192)).resize(size, Image.Resampling.BICUBIC)
    prepare_s = float("inf")
    # The first call imports parts of Pillow.
    for _ in range(2):
        begin = time.perf_counter()
        prepared = prepare_image(image, model.vision)
        prepare_s = min(prepare_s, time.perf_counter() - begin)
    before, after = common.draw_prompts(rng, 2, _TEXT, model.vocab_size - 2)
    given = {"prompt_token_ids": [*before, model.vision.image_token_id, *after], "images": [image]}
    num_tokens = prepared.rows * prepared.columns
    text = {"prompt_token_ids": common.draw_prompts(rng, 1, num_tokens + 2 * _TEXT, model.vocab_size - 2)[0]}
    engine.generate([before], SamplingParams(max_tokens=4, ignore_eos=True))
    want = decode(plain, "a", given, flags.max_tokens)["tokens"]
    repeats = range(flags.repeats)
    alone = [decode(engine, "a", given, flags.max_tokens) for _ in repeats]
    as_text = [decode(engine, "a", text, flags.max_tokens) for _ in repeats]
    slices = time_slices(engine, prepared)
    endless = SamplingParams(max_tokens=1 << 20, temperature=0.8, seed=1, ignore_eos=True)
    for index, prompt in enumerate(common.draw_prompts(rng, flags.streams, _TEXT, model.vocab_size - 2)):
        engine.add_request(prompt_token_ids=prompt, params=endless, request_id=f"s{index}")
    rounds, last = [], time.perf_counter()
    for _ in range(flags.streams + 12):
        engine.step()
        now = time.perf_counter()
        rounds.append(now - last)
        last = now
    beside = [decode_beside(engine, "a", given, flags.max_tokens) for _ in repeats]
    text_beside = [decode_beside(engine, "a", text, flags.max_tokens) for _ in repeats]
    for index in range(flags.streams):
        if engine.scheduler.is_live(f"s{index}"):
            engine.abort(f"s{index}")
    while engine.has_unfinished_requests():
        engine.step()
    assert all(one["tokens"] == want for one in (*alone, *beside)), f"tokens after {size} depend on the way"
    return {
        "image": f"{size[0]}x{size[1]}",
        "image_tokens": num_tokens,
        "slices": tower.count_slices(num_tokens),
        "first_token_s": _median(alone, "first_s"),
        "prepare_s": round(prepare_s, 4),
        "tower_s": round(sum(slices), 4),
        "first_token_as_text_s": _median(as_text, "first_s"),
        "first_token_beside_s": _median(beside, "first_s"),
        "longest_slice_s": round(max(slices), 4),
        "round_s": round(statistics.median(rounds[flags.streams :]), 5),
        "longest_wait_s": round(max(one["longest_s"] for one in beside), 4),
        "longest_wait_as_text_s": round(max(one["longest_s"] for one in text_beside), 4),
        "round_after_image_s": _median_round(alone),
        "round_after_text_s": _median_round(as_text),
    }


def _median(found: list[dict[str, Any]], name: str) -> float:
    return round(statistics.median(one[name] for one in found), 4)


def _median_round(found: list[dict[str, Any]]) -> float:
    return round(statistics.median(seconds for one in found for seconds in one["rounds_s"]), 6)


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure every image."""
    assert flags.shape is not None, "images need --shape: checkpoints with towers are not opened here"
    sizes = [(int(w), int(h)) for w, _, h in (one.partition("x") for one in flags.image.split(","))]
    engine = open_engine(flags, sizes)
    plain = engine
    if flags.mtp_step:
        flags.mtp_step, depth = 0, flags.mtp_step
        plain = open_engine(flags, sizes)
        flags.mtp_step = depth
    rows = [measure(flags, engine, plain, size) for size in sizes]
    return {
        "shape": flags.shape,
        "device": common.device_name(engine),
        "mtp_step": flags.mtp_step,
        "streams": flags.streams,
        "rows": rows,
    }
