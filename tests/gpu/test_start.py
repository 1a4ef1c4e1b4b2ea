"""On a GPU a start compiles every kernel in threads, and leaves none to the requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

# Kernels stay in the process that compiled them: another one starts the engine.
PROGRAM = """
import json, sys, threading
import triton
from compiled_mtp import Engine, EngineConfig, SamplingParams

compiled = []

def listen(*, src, cache_hit, **_):
    if not cache_hit:
        compiled.append((src.name, threading.current_thread() is threading.main_thread()))

triton.knobs.compilation.listener = listen
options = json.loads(sys.argv[2])
engine = Engine(EngineConfig(
    model=sys.argv[1], device="cuda", dtype="bfloat16", max_model_len=256, max_batch=4, prefill_chunk=128,
    mtp_step="auto", mtp_depths=(0, 1, 3), **options))
at_start = list(compiled)
prompts = [list(range(1, 2 + 60 * index)) for index in range(4)]
params = [
    SamplingParams(max_tokens=24, seed=index, ignore_eos=True, temperature=0.9 * (index % 2),
                   top_p=0.9, logprobs=2 if index == 2 else None, presence_penalty=0.5 * (index == 3))
    for index in range(4)]
together = [output.new_token_ids for output in engine.generate(prompts, params)]
alone = [engine.generate([prompt], one)[0].new_token_ids for prompt, one in zip(prompts, params)]
engine.close()
print(json.dumps([at_start, compiled[len(at_start):], together == alone]))
"""


@pytest.mark.parametrize("options", [{"compile": "off"}, {"compile": "on", "graph_mode": "replay"}])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_no_request_compiles_a_kernel(tmp_path: Path, family: str, options: dict[str, str]) -> None:
    write_checkpoint(tmp_path, family)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    at_start, later, is_equal = json.loads(done.stdout.splitlines()[-1])
    assert is_equal
    assert later == []
    # The names of Inductor's begin with "triton_".
    ours = {(name, is_main) for name, is_main in at_start if not name.startswith("triton_")}
    assert len(ours) > 20
    assert not [name for name, is_main in ours if is_main]
