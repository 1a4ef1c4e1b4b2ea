"""Images on a GPU: the tower's bits, rotary positions on three axes, and tokens with graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from compiled_mtp.plan import EncodeSlice, ImageSpan
from compiled_mtp.vision.encoder import Encoder
from compiled_mtp.vision.tower import random_tower, tower_bytes
from tests.engines import make_engine, run_to_end
from tests.ops.harness import check_launch, poisoned_allocations
from tests.ops.test_qk_norm_rope_kv_write import make, with_axes
from tests.vision.checkpoints import picture, vision_oracle, write_vision_checkpoint
from tests.vision.traffic import (
    add,
    check_preempted,
    check_resumed_from_host,
    decode_mixed,
    make_dirt,
    pad_of,
    requests,
)

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_5_moe": {"trunk_experts": "stacked"},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_vision_checkpoint(tmp_path_factory.mktemp(family), family, **options)
        for family, options in FAMILIES.items()
    }


def gpu_engine(directory: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cuda", "prefill_chunk": 128, "block_size": 64, "max_images": 8}
    return make_engine(directory, **(defaults | options))


@cache
def plain_streams(directory: Path, dtype: str) -> dict[str, list[int]]:
    """Each request alone, one token at a time, by separate kernel launches."""
    engine = gpu_engine(
        directory, mtp_step=0, max_batch=1, dtype=dtype, compile="off", graph_mode="off", prefix_cache=False
    )
    tokens: dict[str, list[int]] = {}
    for name, (prompt, params) in requests(pad_of(directory)).items():
        add(engine, name, prompt, params)
        tokens |= run_to_end(engine)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_three_axes(dtype: torch.dtype, fp8: bool) -> None:
    args = with_axes(make(70, 24, 4, 256, dtype=dtype, fp8=fp8, device="cuda"))
    tolerance = 2**-3 if fp8 else {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    with poisoned_allocations():
        check_launch(qk_norm_rope_kv_write, args, rtol=tolerance, atol=1e-5, mutated=(6, 7))


def test_equal_axes_are_one_axis_to_the_bit() -> None:
    results = []
    for has_axes in (False, True):
        args = make(70, 24, 4, 256, dtype=torch.bfloat16, device="cuda")
        if has_axes:
            args = [*args[:4], torch.stack([args[4]] * 3), *args[5:], 33, 30]
        results.append((qk_norm_rope_kv_write(*args), args[6].nan_to_num()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def encode(encoder: Encoder, sizes: tuple[int, int], slice_parts: int) -> torch.Tensor:
    rows, columns = sizes
    pixels = picture(columns * 32, rows * 32, seed=rows).tobytes()
    span, count = ImageSpan(0, rows, columns), encoder.tower.count_parts(rows * columns)
    for first in range(0, count, slice_parts):
        end = min(first + slice_parts, count)
        part = EncodeSlice(0, span, first, end, end == count, b"" if first else pixels)
        encoder.encode(1, part)
    features = encoder.features(1, 0)
    encoder.release({1})
    return features


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_features_are_the_same_bits_again(directories: dict[str, Path], dtype: str) -> None:
    """In slices, beside other work of the device, with a dirty allocator; and near transformers'."""
    engine = gpu_engine(directories["qwen3_5"], dtype=dtype, compile="off", mtp_step=0)
    reference = vision_oracle(directories["qwen3_5"])
    assert engine.runner.encoder is not None
    tower = engine.runner.encoder.tower
    tower.config = replace(tower.config, most_pixels=1 << 21)
    encoder = Encoder(tower)
    # The layers of the last have two parts; transformers' processor would shrink it.
    for sizes in ((1, 1), (3, 10), (12, 12), (32, 32), (33, 34)):
        first = encode(encoder, sizes, tower.count_parts(sizes[0] * sizes[1]))
        if sizes != (33, 34):
            want = reference.features(picture(sizes[1] * 32, sizes[0] * 32, seed=sizes[0]))
            tolerance = {"bfloat16": 0.5, "float32": 2e-3}[dtype]
            assert float((first.float().cpu() - want).abs().max()) < tolerance
        beside = torch.cuda.Stream()
        for slice_parts in (1, 3):
            make_dirt(torch.device("cuda"))
            with torch.cuda.stream(beside):
                other = torch.randn(4096, 4096, device="cuda")
                for _ in range(20):
                    other = other @ other / 64
            assert torch.equal(encode(encoder, sizes, slice_parts), first)
        torch.cuda.synchronize()


def test_the_tower_takes_no_more_than_the_plan_says() -> None:
    """The largest image through a tower of 27B's width."""
    config = VisionConfig(
        depth=2,
        hidden_size=1152,
        num_heads=16,
        intermediate_size=4304,
        out_hidden_size=5120,
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        side=48,
        image_token_id=0,
        video_token_id=1,
        mrope_section=(11, 11, 10),
        least_pixels=65536,
        most_pixels=1280 * 1024,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    encoder = Encoder(random_tower(config, torch.bfloat16, torch.device("cuda")))
    encoder.warm_up()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    features = encode(encoder, (32, 40), 1)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert features.isfinite().all()
    assert taken <= tower_bytes(config, 2)
    assert taken > tower_bytes(config, 2) // 4


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_tokens_uncompiled(directories: dict[str, Path], family: str, dtype: str) -> None:
    """With graphs of uncompiled code, for depths, batches, chunks, without a cache and with preemption."""
    directory = directories[family]
    expected = plain_streams(directory, dtype)
    run = partial(gpu_engine, directory, dtype=dtype, compile="off")
    for options in (
        {"mtp_step": 0},
        {"mtp_step": 1, "max_batch": 3, "prefill_chunk": 64},
        {"mtp_step": 3, "prefill_chunk": 512},
        {"mtp_step": 7, "prefix_cache": False},
        {"mtp_step": "auto", "mtp_depths": (0, 2)},
    ):
        assert decode_mixed(run(**options), 1) == expected, options
    for offload_gb in (0, None):
        sizes = {"num_blocks": 17, "block_size": 16, "max_batch": 6, "prefill_chunk": 64, "lookup": "off"}
        engine = run(offload_gb=offload_gb, **sizes)
        engine.scheduler._planner.admission.tokens_ahead = -40
        assert decode_mixed(engine, 3) == expected
        stats = engine.stats()
        # With a host tier the scheduler may still prefer to recompute a request with few tokens.
        assert stats.recomputes + stats.offloads > 0


@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
def test_same_tokens_compiled(directories: dict[str, Path], graph_mode: str) -> None:
    """Depth 3 and depth 0 give equal tokens, and nothing compiles once requests run."""
    tokens = []
    for mtp_step in (0, 3):
        engine = gpu_engine(
            directories["qwen3_5"],
            mtp_step=mtp_step,
            dtype="float32",
            graph_mode=graph_mode,
            batch_sizes=(1, 4, 8),
        )
        with torch.compiler.set_stance("fail_on_recompile"):
            tokens.append(decode_mixed(engine, mtp_step))
    assert tokens[0] == tokens[1] == plain_streams(directories["qwen3_5"], "float32")


@pytest.mark.parametrize("mtp_step", [0, 3])
def test_prompts_with_images_come_back_from_host_memory(directories: dict[str, Path], mtp_step: int) -> None:
    run = partial(gpu_engine, directories["qwen3_5"], dtype="bfloat16", compile="off")
    sizes = {"max_model_len": 256, "num_blocks": 17, "block_size": 16, "max_batch": 2, "prefill_chunk": 64}
    check_resumed_from_host(run(mtp_step=mtp_step, **sizes), run(mtp_step=0, prefix_cache=False))


@pytest.mark.parametrize(("offload_gb", "counts"), [(0, (2, 0)), (None, (1, 1))])
@pytest.mark.parametrize("most", [1, None])
def test_preempted_requests_with_images(
    directories: dict[str, Path], offload_gb: float | None, counts: tuple[int, int], most: int | None
) -> None:
    """In slices of a part, and whole; recomputed twice, or recomputed and then offloaded."""
    run = partial(gpu_engine, directories["qwen3_5"], dtype="bfloat16", compile="off", prefix_cache=False)
    engine = run(offload_gb=offload_gb, max_in_flight=0)
    if most is not None:
        object.__setattr__(engine.scheduler.limits.tower, "most", most)
    check_preempted(engine, run(mtp_step=0))
    assert (engine.stats().recomputes, engine.stats().offloads) == counts
