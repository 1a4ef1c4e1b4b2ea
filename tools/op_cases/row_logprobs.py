"""Calls of `row_logprobs`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from compiled_mtp.ops.row_logprobs import row_logprobs
from op_cases import INT64, ROWS, SHAPES, LaunchCase, launch, tensor


def make_inputs(device: Any, seed: None, vocab: int) -> tuple[Any, ...]:
    return tensor(device, ROWS, vocab), tensor(device, ROWS, dtype=INT64), vocab - 3


def launches(capability: int) -> Iterator[LaunchCase]:
    for vocab in (SHAPES["27b"].vocab, 1024):
        yield launch(str(vocab), row_logprobs, functools.partial(make_inputs, vocab=vocab))
