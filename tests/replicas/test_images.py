"""Images over replicas, without Ray: two engines with a tower in one process, of which one dies."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.replicas.connection import WithConnection
from compiled_mtp.replicas.decoding import decode
from compiled_mtp.replicas.engine import ReplicatedEngine
from compiled_mtp.replicas.messages import Call, Message
from compiled_mtp.replicas.metrics import ReplicaMetrics
from compiled_mtp.replicas.relay import OpenReplica, RelayLimits
from compiled_mtp.request import SamplingParams
from compiled_mtp.server.app import create_app
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.generation import Service
from compiled_mtp.server.serve import assemble_service
from compiled_mtp.streams.status import QueueFullError
from compiled_mtp.vision.images import PreparedImage
from tests.engines import make_engine
from tests.replicas.scripted import PROMPT, Replica, Truth, in_turn, read
from tests.replicas.scripted import make_engine as scripted_engine
from tests.replicas.test_ingress import ask
from tests.vision.checkpoints import picture, write_vision_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    picture(96, 64, seed).save(stream, "PNG")
    return stream.getvalue()


def content_of(*images: bytes) -> list[dict[str, Any]]:
    uris = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    return [
        *({"type": "image_url", "image_url": {"url": uri}} for uri in uris),
        {"type": "text", "text": "?"},
    ]


def service_of(directory: Path, open_replica: OpenReplica) -> Service:
    """Return a service over replicas, with requests of at most two images."""
    metrics, config = ReplicaMetrics(), EngineConfig(model=directory, max_images=2, device="cpu")
    frontend = open_frontend(config)
    assert frontend.tokenizer is not None
    vision = frontend.model_config.vision
    assert vision is not None
    engine = ReplicatedEngine(
        open_replica,
        metrics,
        RelayLimits(2, 30.0, 30.0),
        seed=None,
        chunk=8,
        num_chunks=1,
        max_open=8,
        stream_buffer=64,
        image_token_id=vision.image_token_id,
    )
    server = ServerConfig(prompt_workers=1, served_model_name=("m",))
    images = (vision, frontend.max_images)
    return assemble_service(engine, metrics, frontend.tokenizer, directory, 512, server, images)


def test_a_client_with_images_does_not_notice(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The replica dies within the answer, and the other encodes the images again, to the same tokens."""
    caplog.set_level(logging.CRITICAL + 1)
    messages = [{"role": "user", "content": content_of(png(1), png(2))}]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (wanted,) = make_engine(directory, max_images=2, mtp_step=0).generate(messages=messages, params=params)

    engines = [make_engine(directory, max_images=2, mtp_step=1) for _ in range(2)]
    step, num_steps = engines[0].step, 0

    def step_or_die() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 5:
            raise RuntimeError("the device fell off")
        return step()

    engines[0].step = step_or_die  # type: ignore[method-assign]
    replicas = {f"r{i}": AsyncEngine(engine) for i, engine in enumerate(engines)}
    calls: list[Call] = []

    async def open_replica(call: Call) -> AsyncIterator[Message]:
        calls.append(call)
        name = next(one for one in replicas if one not in call.avoid)
        async for message in decode(replicas[name], call, name, "same"):
            yield message

    async def run() -> None:
        service = service_of(directory, open_replica)
        # As the app's lifespan does.
        await service.prompts.start()
        try:
            await talk(service)
        finally:
            await service.prompts.close()

    async def talk(service: Service) -> None:
        app = create_app(service)
        app.add_middleware(WithConnection)
        fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"model": "m", "messages": messages, "stream": True} | fields
        status, said, is_whole = await ask(app, "/v1/chat/completions", body)
        assert (status, is_whole) == (200, True)
        events = [json.loads(line[6:]) for line in said.decode().splitlines() if line.startswith("data: {")]
        ids = [i for event in events for one in event["choices"] for i in one.get("token_ids", ())]
        assert ids == wanted.new_token_ids
        _, said, _ = await ask(app, "/metrics")
        assert b"compiled_mtp_failovers_total 1.0" in said
        # Both replicas had the two images, and the drafts of their prompt count apart.
        assert [len(call.images) for call in calls] == [2, 2]
        assert calls[0].images == calls[1].images
        assert re.search(rb"\ncompiled_mtp_image_drafted_tokens_total [1-9]", said)
        # Another first image, another replica preferred.
        other = [{"role": "user", "content": content_of(png(3), png(2))}]
        status, _, _ = await ask(app, "/v1/chat/completions", body | {"messages": other, "stream": False})
        assert status == 200
        assert calls[2].prompt_token_ids == calls[0].prompt_token_ids
        assert calls[2].prefix != calls[0].prefix is not None
        # One image too many is refused before any replica sees it.
        num_calls = len(calls)
        three = [{"role": "user", "content": content_of(png(1), png(2), png(3))}]
        status, said, _ = await ask(app, "/v1/chat/completions", body | {"messages": three})
        assert (status, len(calls)) == (400, num_calls)
        assert "images must be at most 2, got 3" in json.loads(said)["error"]["message"]

    try:
        asyncio.run(run())
    finally:
        for one in replicas.values():
            one.close()


def image_of(num_bytes: int) -> PreparedImage:
    return PreparedImage(1, 1, bytes(num_bytes), b"digest")


def test_pixels_are_bounded_over_replicas() -> None:
    truth = Truth([1, 2], "ab", [0, 1, 2])
    replica = Replica("one", [truth], sizes=random.Random(0))

    async def run() -> None:
        engine = scripted_engine(in_turn(replica), max_image_bytes=100)
        with pytest.raises(ValueError, match=r"images must have at most 100 bytes of pixels .*got 101 bytes"):
            await read(engine, images=[image_of(101)])
        request = {"prompt_token_ids": PROMPT, "images": [image_of(60)]}
        (stream,) = await engine.add_all([request])
        with pytest.raises(QueueFullError, match=r"got 60 and 60 more; try again later"):
            await engine.add_all([request])
        assert [i async for one in stream for i in one.new_token_ids] == [1, 2]
        await asyncio.sleep(0.01)
        # The first has ended, and its images are gone.
        assert len(await read(engine, images=[image_of(60)])) > 0

    asyncio.run(run())


def test_pixels_are_bounded_in_one_engine(directory: Path) -> None:
    async def run() -> None:
        made: Engine = make_engine(directory, max_images=2)
        engine = AsyncEngine(made, max_image_bytes=3 * 32 * 32)
        vision = made.model_config.vision
        assert vision is not None
        pad = vision.image_token_id
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        request = {"prompt_token_ids": [pad], "images": [image_of(3 * 32 * 32)], "params": params}
        try:
            with pytest.raises(ValueError, match="images must have at most 3072 bytes"):
                await engine.add(
                    **request | {"prompt_token_ids": [pad, pad], "images": request["images"] * 2}
                )
            stream = await engine.add(**request)
            with pytest.raises(QueueFullError, match=r"got 3072 and 3072 more"):
                await engine.add(**request)
            # One that is refused by the engine, and one that ends, take nothing.
            stream.abort()
            async for _ in stream:
                pass
            with pytest.raises(ValueError, match="have one image pad for each"):
                await engine.add(**request | {"prompt_token_ids": [1]})
            last = await engine.add(**request | {"params": SamplingParams(max_tokens=1, ignore_eos=True)})
            assert len([one async for one in last]) == 1
            assert engine._open._image_bytes == 0
        finally:
            engine.close()

    asyncio.run(run())
