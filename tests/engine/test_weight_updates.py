"""Weights that are replaced between steps: the tokens of a new engine, and nothing of the old weights."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.aimed import Aim
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engine.interrupts import sample
from tests.engines import make_engine, prompt_of

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"sharded": True}, {}),
    "tied": ({"tied": True}, {"draft_vocab": 300}),
    "next": ({"family": "qwen3_next"}, {"draft_dtype": "float8_e4m3fn"}),
    "moe": ({"family": "qwen3_5_moe"}, {"mtp_step": "auto"}),
    # Products that a CPU packs in half precision.
    "packed": ({"hidden_size": 512, "intermediate_size": 512}, {}),
    "fp8_moe": (dict(FP8_FAMILIES)["moe"], {"weight_recipe": "w8a8"}),
}
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
PROMPTS = [prompt_of(length, length, 500) for length in (3, 70)]


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def given(directory: Path) -> tuple[Any, Iterator[tuple[str, torch.Tensor]]]:
    """Return a checkpoint's manifest and tensors."""
    tensors = tensors_of(directory)
    return {name: (one.shape, one.dtype) for name, one in tensors.items()}, iter(tensors.items())


def outputs_of(engine: Engine) -> list[tuple[list[int], Any]]:
    return [(one.new_token_ids, one.logprobs) for one in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_engine_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    options, settings = KINDS[kind]
    paths = [write_checkpoint(tmp_path / str(seed), seed=seed, **options) for seed in (0, 1)]
    fresh = [make_engine(path, **settings) for path in paths]
    expected = [outputs_of(engine) for engine in fresh]
    assert expected[0] != expected[1]
    engine = make_engine(paths[0], **settings)
    addresses = [tensor.data_ptr() for tensor in engine.runner.step.parameters()]
    assert outputs_of(engine) == expected[0]
    for number, source in ((1, paths[1]), (0, given(paths[0])), (1, given(paths[1]))):
        # The prompts of the old weights are cached.
        engine.update_weights(source)
        assert outputs_of(engine) == expected[number]
        engine.scheduler.check_integrity()
    assert [tensor.data_ptr() for tensor in engine.runner.step.parameters()] == addresses
    if settings.get("mtp_step") != "auto":
        # The draft head and the MTP layer are the new ones: as many drafts are kept as in a new engine.
        kept, wanted = (
            [one.metrics.accepted_by_index for one in every.generate(PROMPTS, PARAMS)]
            for every in (engine, fresh[1])
        )
        assert kept == wanted


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("updates")
    return [write_checkpoint(root / str(seed), seed=seed, hidden_size=64) for seed in (0, 1)]


@pytest.fixture(scope="module")
def expected(paths: list[Path]) -> list[list[int]]:
    """The tokens of one request with each of the weights."""
    return [make_engine(path, mtp_step=0).generate([PROMPTS[1]], LONG)[0].new_token_ids for path in paths]


LONG = SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)


def collect(engine: Engine, outputs: dict[str, list[RequestOutput]]) -> None:
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("running", ["finish", "abort"])
@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_requests_keep_the_weights_that_they_began_with(
    paths: list[Path], expected: list[list[int]], running: Any, max_in_flight: int
) -> None:
    engine = make_engine(paths[0], max_batch=2, max_in_flight=max_in_flight, offload_gb=0)
    outputs: dict[str, list[RequestOutput]] = {}
    for name in ("a", "b", "waiting"):
        engine.add_request(prompt_token_ids=PROMPTS[1], params=LONG, request_id=name)
    while len(tokens_of(outputs.get("b", []))) < 10:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert "waiting" not in outputs
    # In the inbox, not handed over yet.
    engine.add_request(prompt_token_ids=PROMPTS[1], params=LONG, request_id="inbox")
    engine.update_weights(paths[1], running=running)
    collect(engine, outputs)
    for name in ("a", "b"):
        found, last = tokens_of(outputs[name]), outputs[name][-1]
        assert found == expected[0][: len(found)]
        if running == "finish":
            assert (len(found), last.finish_reason, last.error) == (40, "length", None)
        else:
            assert 10 <= len(found) < 40
            assert last.finish_reason == "abort"
            assert last.error == "the engine's weights were replaced before it finished; send it again"
    for name in ("waiting", "inbox"):
        assert tokens_of(outputs[name]) == expected[1]
    assert engine.scheduler.pool.num_used == 0


def test_all_choices_of_a_request_have_the_same_weights(paths: list[Path]) -> None:
    """One decodes, or has just ended, while the other waits: the request has begun."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, n=2, ignore_eos=True)
    plain = make_engine(paths[0], mtp_step=0)
    expected = [output.new_token_ids for output in plain.generate([PROMPTS[0]], params)]
    for num_steps, is_ended in ((3, False), (12, True)):
        engine = make_engine(paths[0], mtp_step=0, max_batch=1)
        engine.add_request(prompt_token_ids=PROMPTS[0], params=params, request_id="a")
        outputs = [output for _ in range(num_steps) for output in engine.step()]
        assert engine.scheduler.num_waiting == 1
        assert any(output.finish_reason is not None for output in outputs) == is_ended
        engine.update_weights(paths[1])
        while engine.has_unfinished_requests():
            outputs += engine.step()
        found = [[t for o in outputs if o.index == index for t in o.new_token_ids] for index in (0, 1)]
        assert found == expected, num_steps


def test_a_failure_midway_leaves_an_engine_that_refuses_requests(
    paths: list[Path], expected: list[list[int]]
) -> None:
    engine = make_engine(paths[0], max_batch=1)
    manifest, tensors = given(paths[1])

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(5):
            yield next(tensors)
        raise OSError("the trainer is gone")

    engine.add_request(prompt_token_ids=PROMPTS[1], params=LONG, request_id="waiting")
    with pytest.raises(OSError, match="the trainer is gone"):
        engine.update_weights((manifest, breaks()))
    with pytest.raises(ValueError, match="engine must have its weights, got one without: an update of its"):
        engine.add_request(prompt_token_ids=[1])
    with pytest.raises(ValueError, match=r"prompts\[0\]: engine must have its weights"):
        engine.generate([[1]])
    outputs: dict[str, list[RequestOutput]] = {}
    collect(engine, outputs)
    (last,) = outputs["waiting"]
    assert (last.finish_reason, last.new_token_ids) == ("abort", [])
    assert "call update_weights again" in (last.error or "")
    engine.update_weights(given(paths[1]))
    assert engine.generate([PROMPTS[1]], LONG)[0].new_token_ids == expected[1]


def test_weights_that_do_not_fit_change_nothing(
    paths: list[Path], expected: list[list[int]], tmp_path: Path
) -> None:
    engine = make_engine(paths[0])
    manifest, _ = given(paths[1])
    other = write_checkpoint(tmp_path / "wide", hidden_size=128)
    fp8 = write_checkpoint(tmp_path / "fp8", **dict(FP8_FAMILIES)["dense"])
    blocks = write_checkpoint(tmp_path / "blocks", hidden_size=64, fp8_scale=torch.float32)
    damaged = write_checkpoint(tmp_path / "damaged", hidden_size=64, seed=1)
    tensors = tensors_of(damaged)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    del tensors[name]
    for file in damaged.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, damaged / "model.safetensors")
    short = {key: value for key, value in manifest.items() if key != name}
    bad_shape = manifest | {name: ((3,), torch.bfloat16)}
    bad_dtype = manifest | {name: (manifest[name][0], torch.int32)}
    for source, text in (
        (other, "hidden_size must be 64, as in the engine's weights, got 128; make another engine"),
        (fp8, "must be "),
        (blocks, "weights must be stored in the formats of the engine's weights, got FP8 in blocks in"),
        (damaged, "missing tensors: "),
        (tmp_path / "nowhere", "nowhere"),
        ((short, iter(())), "missing tensors: "),
        ((bad_shape, iter(())), "misfitting tensors: "),
        ((bad_dtype, iter(())), r"must have a dtype of \['bfloat16', .*\], got torch.int32; convert it"),
        ((manifest | {"mtp.extra": ((3,), torch.bfloat16)}, iter(())), "unused tensors: mtp.extra"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.update_weights(source)
    with pytest.raises(ValueError, match="running must be finish or abort, got 'later'; choose one"):
        engine.update_weights(paths[1], running="later")  # type: ignore[arg-type]
    assert engine.generate([PROMPTS[1]], LONG)[0].new_token_ids == expected[0]


@pytest.mark.parametrize("mistake", ["shape", "twice", "missing", "nan"])
def test_tensors_that_are_not_the_manifests_are_named(paths: list[Path], mistake: str) -> None:
    engine = make_engine(paths[0])
    manifest, tensors = given(paths[1])
    every = list(tensors)
    name, one = every[3]
    if mistake == "shape":
        every[3] = (name, one[..., :1])
    elif mistake == "twice":
        every.insert(4, every[2])
        every.pop(3)
    elif mistake == "missing":
        every = every[:-1]
    else:
        every[3] = (name, torch.full_like(one, float("nan")))
    texts = {
        "shape": "weights must be the manifest's: ",
        "twice": "weights must hold each tensor once",
        "missing": "weights must hold every tensor of their manifest, got no ",
        "nan": f"weights must be finite, got NaN or infinity in {name}",
    }
    with pytest.raises(ValueError, match=texts[mistake]):
        engine.update_weights((manifest, iter(every)))
    with pytest.raises(ValueError, match="engine must have its weights"):
        engine.add_request(prompt_token_ids=[1])


def test_sleep_gives_the_memory_back(paths: list[Path], expected: list[list[int]]) -> None:
    engine = make_engine(paths[0])
    step = weakref.ref(engine.runner.step)
    engine.add_request(prompt_token_ids=PROMPTS[1], params=LONG, request_id="a")
    engine.sleep()
    assert step() is None
    outputs: dict[str, list[RequestOutput]] = {}
    collect(engine, outputs)
    assert tokens_of(outputs["a"]) == expected[0]
    for call, text in (
        (lambda: engine.add_request(prompt_token_ids=[1]), "got one without: it sleeps; call wake_up"),
        (engine.sleep, "got one without: it sleeps; call wake_up"),
        (lambda: engine.update_weights(paths[1]), "engine must be awake for an update, got one that sleeps"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert engine.step() == []
    assert engine.stats().blocks_used == 0
    engine.wake_up()
    with pytest.raises(ValueError, match="engine must sleep before it wakes, got one that is awake"):
        engine.wake_up()
    assert engine.generate([PROMPTS[1]], LONG)[0].new_token_ids == expected[0]
    engine.scheduler.check_integrity()
    engine.add_request(prompt_token_ids=PROMPTS[1], params=LONG, request_id="b")
    for _ in range(5):
        engine.step()
    engine.sleep(running="abort")
    outputs.clear()
    collect(engine, outputs)
    last = outputs["b"][-1]
    assert last.finish_reason == "abort"
    assert last.error == "the engine was put to sleep before it finished; send it again"
    engine.close()


def test_an_interrupted_step_of_an_engine_that_sleeps(
    paths: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(paths[0])
    engine.sleep()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.step() == []
    engine.wake_up()
    assert engine.generate([PROMPTS[1]], LONG)[0].new_token_ids == expected[0]
    engine.close()


# Where an interrupt comes: files, and functions in them.
INTERRUPTED = {
    "holding": (("scheduler/scheduler.py", "scheduler/admission.py"), ("hold_new", "hold", "release_new")),
    "ending": (("scheduler/live_requests.py",), ("end", "finish")),
    "prefixes": (("scheduler", "cache/prefix_index.py"), ("drop_prefixes", "reset")),
    "memory": (("runner/runner.py",), ("sleep", "wake_up")),
    "order": (("runner/weight_control.py",), ("update_weights", "sleep", "wake_up", "_settle")),
}


@pytest.mark.parametrize("what", INTERRUPTED)
@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.soak)])
def test_an_interrupted_change_of_weights_loses_no_request(
    paths: list[Path], expected: list[list[int]], what: str, count: int
) -> None:
    """Two requests decode, and two wait; each ends once, with the tokens of one of the weights."""
    files, functions = INTERRUPTED[what]
    engine = make_engine(paths[0], mtp_step=2, max_batch=2, max_in_flight=1, num_blocks=40, offload_gb=0)
    params = LONG.model_copy(update={"max_tokens": 6})
    wanted, numbers = [tokens[:6] for tokens in expected], itertools.count()
    kept: dict[str, list[RequestOutput]] = {}

    def attack(aim: Aim) -> None:
        names = [f"{next(numbers)}" for _ in range(4)]
        for name in names:
            engine.add_request(prompt_token_ids=PROMPTS[1], params=params, request_id=name)
        while not all(name in kept for name in names[:2]):
            for output in engine.step():
                kept.setdefault(output.request_id, []).append(output)
        with suppress(KeyboardInterrupt), aim.watching():
            engine.update_weights(paths[1], running="abort")
            engine.sleep(running="abort")
            engine.wake_up()
        collect(engine, kept)
        if engine.runner.is_asleep:
            engine.wake_up()
        # Also if it has its old weights, or none.
        engine.update_weights(paths[0])
        engine.scheduler.check_integrity()
        for name in names:
            assert [output.finish_reason is not None for output in kept[name]].count(True) == 1
            assert any(tokens_of(kept[name]) == one[: len(tokens_of(kept[name]))] for one in wanted)
        assert engine.generate([PROMPTS[1]], params)[0].new_token_ids == wanted[0]

    watch = Aim(files, functions)
    attack(watch)
    for target in sample(watch.targets(), count):
        aim = Aim(files, functions, target=target)
        attack(aim)
        assert aim.is_hit, target


def test_an_engine_wakes_with_its_last_weights(paths: list[Path], expected: list[list[int]]) -> None:
    engine = make_engine(paths[0], scoring=True)

    def tokens() -> list[int]:
        return engine.generate([PROMPTS[1]], LONG)[0].new_token_ids

    engine.update_weights(paths[1])
    engine.sleep(running="abort")
    engine.wake_up()
    assert tokens() == expected[1]
    engine.sleep()
    engine.wake_up(given(paths[0]))
    assert tokens() == expected[0]
    engine.sleep()
    with pytest.raises(
        ValueError, match="source must be given where the last weights were tensors, got None"
    ):
        engine.wake_up()
    engine.wake_up(paths[0])
    assert tokens() == expected[0]
    engine.sleep()
    with pytest.raises(ValueError, match="nowhere"):
        engine.wake_up(paths[0] / "nowhere")
    with pytest.raises(ValueError, match="it sleeps; call wake_up"):
        tokens()
    manifest, tensors = given(paths[0])
    with pytest.raises(ValueError, match="weights must hold every tensor of their manifest"):
        engine.wake_up((manifest, itertools.islice(tensors, 5)))
    with pytest.raises(ValueError, match="its weights were not replaced; call update_weights again"):
        tokens()
    engine.update_weights(paths[1])
    assert tokens() == expected[1]
    engine.sleep()
    engine.wake_up(paths[0])
    engine.sleep()
    # The directory that was read last.
    engine.wake_up()
    assert tokens() == expected[0]


def tensor_elements() -> int:
    """The elements of all tensors of the process."""
    gc.collect()
    return sum(one.numel() for one in gc.get_objects() if type(one) is torch.Tensor)


def check_sleeps(
    paths: list[Path],
    expected: list[list[int]],
    count: int,
    held: Callable[[], int] = tensor_elements,
    **settings: Any,
) -> None:
    """Sleep and wake up `count` times, with the two weights in turns; `held()`, the memory in use while the
    engine sleeps, does not grow."""
    engine = make_engine(paths[0], **settings)
    sizes = []
    for turn in range(count):
        engine.sleep()
        sizes.append(held())
        engine.wake_up(paths[turn % 2])
        assert engine.generate([PROMPTS[1]], LONG)[0].new_token_ids == expected[turn % 2]
        engine.scheduler.check_integrity()
    assert max(sizes[10:]) <= max(sizes[:10])
    engine.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_sleeps_leave_nothing_behind(paths: list[Path], expected: list[list[int]]) -> None:
    check_sleeps(paths, expected, 50)


def check_traffic(
    paths: list[Path],
    expected: list[list[int]],
    count: int,
    held: Callable[[], int] = tensor_elements,
    **settings: Any,
) -> list[int]:
    """Update `count` times while requests come: every request has the tokens of the weights with which it
    began, and ends or is ended by name; `held()`, the memory in use, stays flat. Returns the requests that
    ended by themselves with each of the weights."""
    rng = random.Random(0)
    engine = make_engine(paths[0], max_batch=3, **({"max_in_flight": 1} | settings))
    outputs: dict[str, list[RequestOutput]] = {}
    # The weights with which each request began.
    began: dict[str, int] = {}
    current, sizes = 0, []
    for number in range(count):
        for index in range(rng.randint(0, 3)):
            engine.add_request(prompt_token_ids=PROMPTS[1], params=LONG, request_id=f"{number}-{index}")
        for _ in range(rng.randint(0, 12)):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
                began.setdefault(output.request_id, current)
        for scheduled in engine.scheduler._resources.owners.values():
            began.setdefault(scheduled.request.request_id, current)
        running = rng.choice(["finish", "abort"])
        current = 1 - current
        source: Any = paths[current] if number % 2 else given(paths[current])
        engine.update_weights(source, running=running)
        engine.scheduler.check_integrity()
        sizes.append(held())
    collect(engine, outputs)
    whole = [0, 0]
    for name, own in outputs.items():
        found, last, weights = tokens_of(own), own[-1], began.get(name, current)
        assert found == expected[weights][: len(found)], name
        if last.finish_reason == "abort":
            assert last.error == "the engine's weights were replaced before it finished; send it again"
        else:
            assert len(found) == 40
            whole[weights] += 1
    # The first updates may fill caches of the process.
    half = len(sizes) // 2
    assert max(sizes[half:]) <= max(sizes[: half + 1]) * 1.01 + 1000
    engine.close()
    return whole


def test_updates_under_traffic(paths: list[Path], expected: list[list[int]]) -> None:
    assert sum(check_traffic(paths, expected, 4)) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_updates_under_traffic(paths: list[Path], expected: list[list[int]]) -> None:
    assert min(check_traffic(paths, expected, 100)) > 0
