"""Arguments for `sample` and an independent implementation of it in NumPy and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from compiled_mtp.ops.sample import SamplingTables

Case = dict[str, Any]
_DTYPES = {
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "top_k": torch.int32,
    "seed": torch.int64,
    "min_position": torch.int64,
}
_NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0, "seed": 7}


def make_case(logits: torch.Tensor, requests: int = 1, **over: Any) -> Case:
    """Arguments that do nothing but what `over` asks; request i has slot i + 1, slot 0 repeats the first.

    A table in `over` has one entry a request, or one for all.
    """
    rows, vocab = logits.shape
    case: Case = {
        "logits": logits,
        "tokens": torch.zeros(rows, dtype=torch.int64),
        "positions": torch.arange(rows) + 10,
        "state_index": torch.arange(1, requests + 1, dtype=torch.int32),
        "output_counts": torch.zeros(0, vocab, dtype=torch.int32),
        "prompt_seen": torch.zeros(0, vocab, dtype=torch.bool),
        "bias": torch.zeros(0, vocab),
        "stop_ids": torch.zeros(0, 1, dtype=torch.int64),
        "num_valid_ids": vocab,
    }
    for name, dtype in _DTYPES.items():
        value = torch.as_tensor(over.pop(name, _NEUTRAL.get(name, 0)), dtype=dtype).expand(requests)
        case[name] = torch.cat([value[:1], value])
    case |= over
    names = ("logits", "tokens", "positions", "state_index", *SamplingTables._fields, "num_valid_ids")
    return {name: case[name] for name in names}


def arguments(case: Case) -> tuple[Any, ...]:
    """What `sample` takes."""
    tables = SamplingTables(*(case[name] for name in SamplingTables._fields))
    window = (case["logits"], case["tokens"], case["positions"], case["state_index"])
    return *window, tables, case["num_valid_ids"]


def full_case(vocab: int, query_len: int = 3) -> Case:
    """Twelve requests with every feature in some combination, and rows with NaN, infinities and ties."""
    generator = torch.Generator().manual_seed(0)
    requests, far = 12, 1 << 33
    rows, slots = requests * query_len, requests + 1
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[0, 5] = logits[0, 9] = 60.0
    logits[3] = float("nan")
    logits[4, ::2] = float("nan")
    logits[5, 7] = float("inf")
    logits[6] = 1.0
    presence = [0.0, 0.2, 0.0, 0.3, 0.0, 0.5, 0.1, 0.0, 0.0, 0.0, 0.8, 0.0]
    return make_case(
        logits,
        requests,
        tokens=torch.randint(0, vocab, (rows,), generator=generator),
        positions=torch.arange(rows) + far,
        temperature=[0.0, 0.7, 1.0, 1.0, 1.0, 0.5, 1.0, 0.9, 1.3, 1.0, 2.0, 1.0],
        top_k=[0, 0, 20, 0, 0, 50, 1, vocab * 4 // 5, 0, vocab - 1, 5, 3],
        top_p=[1.0, 1.0, 1.0, 0.9, 1.0, 0.8, 0.5, 0.95, 0.99, 0.3, 0.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.02, 0.0, 0.05, 0.0, 0.5],
        repetition_penalty=[1.2, 1.0, 1.3, 1.0, 1.0, 1.1, 1.0, 1.0, 1.0, 0.8, 1.0, 1.0],
        presence_penalty=presence,
        frequency_penalty=presence[::-1],
        seed=torch.randint(-(2**62), 2**62, (requests,), generator=generator),
        min_position=far + 15,
        output_counts=torch.randint(0, 3, (slots, vocab), generator=generator, dtype=torch.int32),
        prompt_seen=torch.rand(slots, vocab, generator=generator) < 0.1,
        bias=torch.randn(slots, vocab, generator=generator),
        stop_ids=torch.randint(-1, vocab, (slots, 3), generator=generator),
        num_valid_ids=vocab - 3,
    )


def part_of(case: Case, first: int, requests: int) -> Case:
    """The same call for some of its requests only."""
    query_len = case["logits"].shape[0] // case["state_index"].shape[0]
    rows = slice(first * query_len, (first + requests) * query_len)
    return case | {
        "logits": case["logits"][rows],
        "tokens": case["tokens"][rows],
        "positions": case["positions"][rows],
        "state_index": case["state_index"][first : first + requests],
    }


def numpy_philox(counter: list[Any], key: list[int]) -> list[Any]:
    """Philox4x32-10 as published (Salmon et al. 2011, section 3.3), in unsigned 64-bit integers."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = list(key)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (product1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            product1 & low,
            (product0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            product0 & low,
        ]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def numpy_noise(seed: int, position: int, vocab: int) -> np.ndarray[Any, Any]:
    """The Gumbel noise of ids 0..vocab-1 in float64, from uniforms rounded to float32 as specified."""
    block = np.arange((vocab + 3) // 4)
    counter = [block, 0 * block, position % (1 << 32) + 0 * block, (position >> 32) % (1 << 32) + 0 * block]
    words = np.stack(numpy_philox(counter, [seed % (1 << 32), (seed >> 32) % (1 << 32)]), 1).reshape(-1)
    uniform = words[:vocab].astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return -np.log(-np.log1p(-np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(np.float64)))


def numpy_scores(case: Case, row: int) -> tuple[np.ndarray[Any, Any], bool]:
    """A row's processed, tempered and filtered logits in float64, and whether noise is added to them."""
    query_len = case["logits"].shape[0] // case["state_index"].shape[0]
    slot = int(case["state_index"][row // query_len])
    x = case["logits"][row].double().numpy().copy()
    vocab = len(x)
    x[~np.isfinite(x)] = -np.inf
    count, seen = np.zeros(vocab), np.zeros(vocab, dtype=bool)
    if len(case["output_counts"]):
        count = case["output_counts"][slot].double().numpy().copy()
        for draft in range(row - row % query_len + 1, row + 1):
            count[int(case["tokens"][draft])] += 1
    if len(case["prompt_seen"]):
        seen = case["prompt_seen"][slot].numpy()
    penalty = float(case["repetition_penalty"][slot])
    for v in np.nonzero(seen | (count > 0))[0]:
        x[v] = x[v] / penalty if x[v] > 0 else x[v] * penalty
    x -= float(case["presence_penalty"][slot]) * (count > 0)
    x -= float(case["frequency_penalty"][slot]) * count
    if len(case["bias"]):
        x += case["bias"][slot].double().numpy()
    if len(case["stop_ids"]) and int(case["positions"][row]) < int(case["min_position"][slot]):
        for stop in case["stop_ids"][slot].tolist():
            if 0 <= stop < vocab:
                x[stop] = -np.inf
    x[case["num_valid_ids"] :] = -np.inf
    temperature = float(case["temperature"][slot])
    if temperature < 1e-5 or not np.isfinite(x).any():
        return x, False
    x /= temperature
    top_k = int(case["top_k"][slot])
    if 0 < top_k < vocab:
        x[x < np.sort(x)[-top_k]] = -np.inf
    weight = np.exp(x - x.max())
    order = np.argsort(-weight, kind="stable")
    is_kept = weight >= float(case["min_p"][slot])
    if float(case["top_p"][slot]) < 1:
        reached = np.cumsum(weight[order]) / weight.sum()
        last = min(int((reached < float(case["top_p"][slot])).sum()), vocab - 1)
        is_kept &= weight >= weight[order[last]]
    return np.where(is_kept, x, -np.inf), True


def numpy_token(case: Case, row: int) -> int:
    """The token that the rules give for one row."""
    query_len = case["logits"].shape[0] // case["state_index"].shape[0]
    x, is_random = numpy_scores(case, row)
    if not np.isfinite(x).any():
        return 0
    if is_random:
        seed = int(case["seed"][int(case["state_index"][row // query_len])])
        x = x + numpy_noise(seed, int(case["positions"][row]), len(x))
    return int(np.argmax(x))
