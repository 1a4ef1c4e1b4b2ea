"""Entries of log probabilities: one per token, cut with the tokens, shown with their text."""

from __future__ import annotations

import math
import random

import pytest

from compiled_mtp.plan import RowLogprobs
from compiled_mtp.sampling.logprobs import (
    LogprobQueue,
    TokenLogprob,
    TopLogprob,
    make_entries,
)
from compiled_mtp.sampling.stop_strings import StopStrings
from tests.sampling.grammars import IM_END, TOKENIZER

ROWS = RowLogprobs(
    logprobs=[-0.5, -1.5, -9.0],
    ranks=[1, 2, 300],
    top_ids=[[90, 17, 3], [17, 92, IM_END], [3, 17, 90]],
    top_logprobs=[[-0.5, -1.0, -math.inf], [-1.0, -1.5, -2.0], [-1.0, -2.0, -3.0]],
    entropies=[0.25, 1.0, 2.0],
)


def entry(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, TOKENIZER.token_bytes(token_id), -1.0, 1, (), 0.5)


def test_entries_hold_what_the_device_found() -> None:
    entries = make_entries([90, 92], ROWS, 20, TOKENIZER.token_bytes)
    assert [(e.token_id, e.bytes, e.logprob, e.rank, e.entropy) for e in entries] == [
        (90, b"{", -0.5, 1, 0.25),
        (92, b"}", -1.5, 2, 1.0),
    ]
    # Ids that cannot be drawn are not listed, and a special token has no text.
    assert entries[0].top == (TopLogprob(90, b"{", -0.5), TopLogprob(17, b"2", -1.0))
    assert entries[1].top[2] == TopLogprob(IM_END, b"", -2.0)


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_the_list_is_as_long_as_asked(num_top: int) -> None:
    entries = make_entries([5, 6, 7], ROWS, num_top, TOKENIZER.token_bytes)
    assert [len(e.top) for e in entries] == [num_top] * 3


def test_entries_come_when_their_text_is_shown() -> None:
    queue = LogprobQueue()
    for token_id, num_characters in ((1, 2), (2, 0), (3, 4), (4, 1)):
        queue.add(entry(token_id), num_characters)
    assert [e.token_id for e in queue.take(1)] == []
    # A token without text comes with the token before it.
    assert [e.token_id for e in queue.take(1)] == [1, 2]
    assert [e.token_id for e in queue.take(3)] == []
    assert [e.token_id for e in queue.take(1)] == [3]
    assert [e.token_id for e in queue.flush()] == [4]
    assert queue.flush() == queue.take(9) == []


@pytest.mark.parametrize("seed", range(20))
def test_entries_follow_the_text_however_windows_cut_it(seed: int) -> None:
    """With stop strings and characters of several tokens, each entry comes once, in order, not too early."""
    rng = random.Random(seed)
    tokens = TOKENIZER.encode("def größe(x): return 'STO' + '☃ snow' # STO" + "P" * (seed % 2) + " rest")
    stops, decoder, queue = StopStrings(["STOP", "turn 7"], False), TOKENIZER.detokenizer(), LogprobQueue()
    kept, shown, given, is_stopped = 0, "", [], False
    while kept < len(tokens) and not is_stopped:
        for token_id in tokens[kept : kept + rng.randint(1, 4)]:
            decoded = decoder.add(token_id)
            queue.add(entry(token_id), len(decoded))
            text, is_stopped = stops.add(decoded)
            shown, kept = shown + text, kept + 1
            given += [e.token_id for e in queue.take(len(text))]
            assert shown.startswith(TOKENIZER.decode(given).rstrip("\ufffd"))
            if is_stopped:
                break
    given += [e.token_id for e in queue.flush()]
    assert given == tokens[:kept]
    assert is_stopped == bool(seed % 2)
