"""Images over two replicas on Ray Serve (`make replicas`): streams with images outlive a replica."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiled_mtp.request import SamplingParams
from tests.engines import make_engine
from tests.replicas.test_images import content_of, png
from tests.replicas.test_ray import ARGS, Served, on_ray
from tests.vision.checkpoints import write_vision_checkpoint

pytestmark = [pytest.mark.replicas, pytest.mark.timeout(900)]

COUNT = 400


def test_streams_with_images_outlive_a_replica(tmp_path: Path) -> None:
    directory = write_vision_checkpoint(tmp_path)
    chats = [[{"role": "user", "content": content_of(png(seed), png(seed + 1))}] for seed in range(4)]
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    engine = make_engine(directory, max_images=2, mtp_step=0, num_threads=1)
    wanted = [engine.generate(messages=chat, params=params)[0].new_token_ids for chat in chats]
    engine.close()
    # Both replicas get streams: the preferred one may have no request more than the other.
    names = {"model": str(directory), "served_model_name": "m", "max_images": 2, "max_imbalance": 0}
    with on_ray(ARGS | names | {"max_model_len": 512}) as served:
        found = asyncio.run(decode_all(served, chats))
        assert served.metric("compiled_mtp_failovers_total") > 0
        assert served.metric("compiled_mtp_image_drafted_tokens_total") > 0
    assert found == wanted


async def decode_all(served: Served, chats: list[Any]) -> list[list[int]]:
    """Decode the chats together, and kill a replica in between."""
    found: list[list[int]] = [[] for _ in chats]
    async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:

        async def follow(chat: Any, ids: list[int]) -> None:
            fields = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            body = {"model": "m", "messages": chat, "stream": True} | fields
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        choices = json.loads(line[6:])["choices"]
                        ids += [i for choice in choices for i in choice.get("token_ids", ())]

        async def kill_one() -> None:
            pid = (await asyncio.to_thread(served.wait_for, 2))[0]["pid"]
            while not all(found):
                await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        await asyncio.gather(kill_one(), *map(follow, chats, found))
    return found
