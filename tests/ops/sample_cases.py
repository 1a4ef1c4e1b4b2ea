"""Arguments for `sample` and an independent implementation of it in NumPy and float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from compiled_mtp.ops.features import BAD_WORDS, BIAS, PENALTIES, RECENT_IDS, STOP_IDS
from compiled_mtp.ops.sample import SamplingTables
from tests.sampling import numpy_sampling

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
_TABLES_OF = {BIAS: "bias", STOP_IDS: "stop_ids", BAD_WORDS: "bad_words"}


def make_case(logits: torch.Tensor, requests: int = 1, **over: Any) -> Case:
    """Return a case in which only the features in `over` are active; request i has slot i + 1.

    Slot 0 repeats the first request's parameters. A parameter in `over` has one entry per request, or one for
    all; a table has one row per slot. tokens: the window's tokens, of which the drafts are taken. bad_words:
    a list of words per slot.
    """
    rows, vocab = logits.shape
    num_ids = over.pop("num_ids", vocab)
    tokens = over.pop("tokens", torch.zeros(rows, dtype=torch.int64))
    slots = requests + 1
    case: Case = {
        "logits": logits,
        "drafts": tokens.view(requests, -1)[:, 1:],
        "positions": torch.arange(rows) + 10,
        "state_index": torch.arange(1, slots, dtype=torch.int32),
        "output_counts": torch.zeros(slots, num_ids, dtype=torch.int32),
        "prompt_seen": torch.zeros(slots, num_ids, dtype=torch.bool),
        "bias": torch.full((slots, num_ids), float("nan")),
        "stop_ids": torch.full((slots, 1), -1),
        "recent_ids": torch.full((slots, RECENT_IDS), -1),
        "num_valid_ids": num_ids,
        "column_ids": None,
        "masks": None,
    }
    used = sum(bit for bit, name in _TABLES_OF.items() if name in over)
    words = over.pop("bad_words", [[]] * slots)
    width = max(1, *map(len, words))
    case["bad_words"] = torch.full((slots, width, RECENT_IDS), -1)
    case["bad_word_lengths"] = torch.zeros(slots, width, dtype=torch.int32)
    for slot, own in enumerate(words):
        for i, word in enumerate(own):
            case["bad_words"][slot, i, : len(word)] = torch.tensor(word)
            case["bad_word_lengths"][slot, i] = len(word)
    for name, dtype in _DTYPES.items():
        value = torch.as_tensor(over.pop(name, _NEUTRAL.get(name, 0)), dtype=dtype).expand(requests)
        case[name] = torch.cat([value[:1], value])
    has_penalty = (case["presence_penalty"] != 0) | (case["frequency_penalty"] != 0)
    has_penalty |= case["repetition_penalty"] != 1
    case["features"] = (has_penalty * PENALTIES + used).to(torch.int32)
    case |= over
    names = ("logits", "drafts", "positions", "state_index", *SamplingTables._fields)
    return {name: case[name] for name in (*names, "num_valid_ids", "column_ids", "masks")}


def arguments(case: Case) -> tuple[Any, ...]:
    """Return the arguments of `sample`."""
    tables = SamplingTables(*(case[name] for name in SamplingTables._fields))
    window = (case["logits"], case["drafts"], case["positions"], case["state_index"])
    return *window, tables, case["num_valid_ids"], case["column_ids"], case["masks"]


def pack_masks(is_allowed: torch.Tensor) -> torch.Tensor:
    """Pack bools [M, n] as `sample` takes them: 32 per word, the lowest bit first."""
    words = -(-is_allowed.shape[1] // 32)
    padded = torch.zeros(is_allowed.shape[0], words * 32, dtype=torch.int64)
    padded[:, : is_allowed.shape[1]] = is_allowed
    bits = (padded.view(-1, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def full_case(vocab: int, query_len: int = 3) -> Case:
    """Return a case of twelve requests that combine all features, with rows of NaN, infinities and ties."""
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
        bad_words=[[], *[[[5], [3, 4], [*range(16)]][: i % 4] for i in range(requests)]],
        recent_ids=torch.randint(0, 6, (slots, RECENT_IDS), generator=generator),
        masks=pack_masks(torch.rand(rows, vocab, generator=generator) < 0.9),
        num_valid_ids=vocab - 3,
    )


def part_of(case: Case, first: int, requests: int) -> Case:
    """Return the same call for `requests` requests from `first` on."""
    query_len = case["logits"].shape[0] // case["state_index"].shape[0]
    rows = slice(first * query_len, (first + requests) * query_len)
    return case | {
        "logits": case["logits"][rows],
        "drafts": case["drafts"][first : first + requests],
        "positions": case["positions"][rows],
        "masks": None if case["masks"] is None else case["masks"][rows],
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


def numpy_rules(case: Case, slot: int) -> numpy_sampling.Rules:
    """Return a slot's parameters and tables in the form of the independent specification; its prompt has
    length 0."""
    features = int(case["features"][slot])
    bias = case["bias"][slot].tolist() if features & BIAS else []
    lengths = case["bad_word_lengths"][slot].tolist() if features & BAD_WORDS else []
    words = zip(case["bad_words"][slot].tolist(), lengths, strict=False)
    is_penalized = bool(features & PENALTIES)
    return numpy_sampling.Rules(
        **{name: case[name][slot].item() for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
        repetition_penalty=float(case["repetition_penalty"][slot]) if is_penalized else 1.0,
        presence_penalty=float(case["presence_penalty"][slot]) if is_penalized else 0.0,
        frequency_penalty=float(case["frequency_penalty"][slot]) if is_penalized else 0.0,
        logit_bias=dict(enumerate(bias)),
        bad_words=tuple(tuple(word[:length]) for word, length in words if length),
    )


def numpy_scores(case: Case, row: int) -> tuple[np.ndarray[Any, Any], bool]:
    """Return a row's processed, tempered and filtered logits in float64, and whether it gets noise."""
    query_len = case["logits"].shape[0] // case["state_index"].shape[0]
    slot, position = int(case["state_index"][row // query_len]), int(case["positions"][row])
    rules = numpy_rules(case, slot)
    drafts = case["drafts"][row // query_len]
    before = drafts[: len(drafts) - (query_len - 1) + row % query_len].tolist()
    counts = case["output_counts"][slot].tolist()
    counted = [token for token, count in enumerate(counts) for _ in range(count)]
    prompt = case["prompt_seen"][slot].nonzero().flatten().tolist()
    free = dataclasses.replace(rules, bad_words=())
    logits, num_valid_ids = case["logits"][row].numpy(), case["num_valid_ids"]
    x = numpy_sampling.processed(logits, prompt, counted + before, free, num_valid_ids)
    recent = case["recent_ids"][slot].tolist()
    first = position - len(before) - 15
    history = [recent[p % RECENT_IDS] for p in range(first, position - len(before))] + before
    x[list(numpy_sampling.banned_ids(history, rules))] = -np.inf
    if int(case["features"][slot]) & STOP_IDS and position < int(case["min_position"][slot]):
        x[[stop for stop in case["stop_ids"][slot].tolist() if 0 <= stop < len(x)]] = -np.inf
    if case["masks"] is not None:
        words = case["masks"][row].numpy().astype(np.int64)
        x[[(words[v // 32] >> (v % 32)) & 1 == 0 for v in range(len(x))]] = -np.inf
    is_random = rules.temperature >= numpy_sampling.GREEDY and bool(np.isfinite(x).any())
    return (numpy_sampling.filtered(x, rules) if is_random else x), is_random


def numpy_token(case: Case, row: int) -> int:
    """Return the token that the rules give for one row."""
    query_len = case["logits"].shape[0] // case["state_index"].shape[0]
    x, is_random = numpy_scores(case, row)
    if not np.isfinite(x).any():
        return 0
    if is_random:
        seed = int(case["seed"][int(case["state_index"][row // query_len])])
        x = x + numpy_noise(seed, int(case["positions"][row]), len(x))
    return int(np.argmax(x))


def in_columns(case: Case, columns: torch.Tensor) -> Case:
    """Return the same call for a head with the given columns, in their order."""
    return case | {"logits": case["logits"][:, columns], "column_ids": columns}
