"""Cases of `find_drafts`: the texts of requests searched for their last ids."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.find_drafts import FIRST_CHAIN_KEPT, FIRST_THRESHOLD, LookupState, find_drafts
from op_cases import INT32, INT64, LaunchCase, ModelShape, OpCase, launch

DRAFTS, CHAIN = 15, 3
# Ids of the random texts: so few that most blocks of a text hold a short match.
NUM_IDS = 200


def make_inputs(device: Any, seed: int | None, requests: int, tokens: int) -> tuple[Any, ...]:
    """Return the arguments of requests whose texts have `tokens` ids each, their last 20 ids twice."""
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    slots = requests + 2
    draw = functools.partial(torch.randint, generator=generator, device=device)
    text = draw(NUM_IDS, (slots, tokens), dtype=INT32)
    if seed is not None:
        text[:, tokens // 3 : tokens // 3 + 20] = text[:, -20:]
    full = functools.partial(torch.full, (slots,), dtype=INT32, device=device)
    lookup = LookupState(full(0), full(FIRST_THRESHOLD), full(FIRST_CHAIN_KEPT))
    pos = torch.full((slots,), tokens - 1, dtype=INT64, device=device)
    index = torch.arange(1, requests + 1, dtype=INT32, device=device)
    drafts = torch.zeros((slots, DRAFTS), dtype=INT64, device=device)
    accepted = torch.ones((requests, 3 + CHAIN), dtype=INT64, device=device)
    return text, index, pos, draw(NUM_IDS, (requests, CHAIN)), lookup, drafts, accepted


def check(args: tuple[Any, ...]) -> None:
    """Raise AssertionError unless the operator gives exactly what the reference does."""
    text, index, pos, chain, lookup, drafts, accepted = args
    sides = []
    for function in (find_drafts, find_drafts.reference):
        own = LookupState(*(column.clone() for column in lookup))
        left = drafts.clone()
        sides.append([*function(text, index, pos, chain, own, left, accepted), *own, left])
    assert all(torch.equal(got, wanted) for got, wanted in zip(*sides, strict=True))


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return the case of `rows` requests with texts of `tokens` ids; no model's shape matters."""
    tokens = settings.get("tokens", 32768)
    make = functools.partial(make_inputs, requests=rows, tokens=tokens)
    return [OpCase(f"B {rows} tokens {tokens}", make, find_drafts, 4 * rows * tokens, check)]


def launches(capability: int) -> Iterator[LaunchCase]:
    make = functools.partial(make_inputs, requests=2, tokens=4096)
    yield launch("round", find_drafts, make)
    yield launch("first", find_drafts, lambda device, seed: make(device, seed)[:-1])
