"""Routed experts over the service: base64 of the engine's int16 ids."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx

from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine
from tests.server.serving import running


def test_choices_carry_their_experts(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_5_moe", tokenizer=True)
    options: dict[str, Any] = {"routed_experts": True, "mtp_step": 3}
    params = SamplingParams(max_tokens=6, temperature=0, return_routed_experts=True, ignore_eos=True)
    (expected,) = make_engine(directory, **options).generate([[5, 6, 7]], params)
    assert expected.routed_experts is not None
    with running(make_engine(directory, **options), directory) as server:
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        asking = body | {"return_routed_experts": True}
        post = httpx.post(f"{server.url}/v1/completions", json=asking, timeout=60)
        assert post.status_code == 200, post.text
        found = post.json()["choices"][0]["routed_experts"]
        assert found["dtype"] == "int16"
        assert tuple(found["shape"]) == expected.routed_experts.shape == (8, 4, 4)
        assert base64.b64decode(found["data"]) == expected.routed_experts.data
        plain = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert "routed_experts" not in plain.json()["choices"][0]
        stream = httpx.post(f"{server.url}/v1/completions", json=asking | {"stream": True}, timeout=60)
        assert stream.status_code == 400
        assert "return_routed_experts must be left out of a stream" in stream.text
