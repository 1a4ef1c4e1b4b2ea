"""Which ids drafts are chosen from, as `draft_vocab` says; no torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from compiled_mtp.errors import check, fail, quote, shown

# Some thirty times what every id of a large vocabulary takes; a device may have no end.
_MOST_CHARACTERS = 2**26
_MAKE_ONE = "make one with `compiled-mtp rank-vocabulary`"


def read_ids(path: Path, num_valid_ids: int) -> list[int]:
    """The ids in a file, one a line or a JSON list of them, in its order.

    Raises ValueError, naming draft_vocab and what is wrong, for a file that cannot be read, without ids, with
    something that is no id, with an id twice, or with one beyond num_valid_ids.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARACTERS + 1)
    except (OSError, ValueError) as error:  # What is no UTF-8, a path with a zero in it.
        rule = "be a number of ids or a readable file of ids"
        raise fail("draft_vocab", rule, quote(str(path)), f"{error}; {_MAKE_ONE}") from None
    rule = f"name a file of at most {_MOST_CHARACTERS} characters"
    check(len(text) <= _MOST_CHARACTERS, "draft_vocab", rule, f"more in {path}", _MAKE_ONE)
    text = text.strip()
    entries: object
    try:
        entries = json.loads(text) if text.startswith("[") else [json.loads(e) for e in text.split()]
    except (ValueError, RecursionError) as error:
        rule = "name a file with an id a line or a JSON list of them"
        raise fail("draft_vocab", rule, quote(str(path)), f"{error}; {_MAKE_ONE}") from None
    ids: list[int] = []
    seen: set[int] = set()
    assert isinstance(entries, list)
    for entry in entries:
        # A bool is an int of Python's.
        if type(entry) is not int or not 0 <= entry < num_valid_ids:
            rule = f"name ids in 0..{num_valid_ids - 1} only"
            remedy = f"drop it from {path}, or count anew with this checkpoint's tokenizer"
            raise fail("draft_vocab", rule, shown(entry), remedy)
        if entry in seen:
            raise fail("draft_vocab", "name every id once", f"{entry} twice", f"drop one from {path}")
        seen.add(entry)
        ids.append(entry)
    if not ids:
        raise fail("draft_vocab", "name at least one id", "an empty file", f"{_MAKE_ONE} as {path}")
    return ids


def choose_draft_ids(
    draft_vocab: int | Path | None, num_valid_ids: int, eos_token_ids: Collection[int]
) -> tuple[int, ...] | None:
    """The ids that drafts are chosen from, ascending, None for all; eos ids are always among them.

    Raises ValueError for more than num_valid_ids, and as `read_ids`.
    """
    if draft_vocab is None:
        return None
    if isinstance(draft_vocab, int):
        rule = f"be at most {num_valid_ids}, the ids of this checkpoint"
        check(draft_vocab <= num_valid_ids, "draft_vocab", rule, draft_vocab, "leave it out for all of them")
    named = range(draft_vocab) if isinstance(draft_vocab, int) else read_ids(draft_vocab, num_valid_ids)
    ids = {*named, *(i for i in eos_token_ids if i < num_valid_ids)}
    return None if len(ids) == num_valid_ids else tuple(sorted(ids))
