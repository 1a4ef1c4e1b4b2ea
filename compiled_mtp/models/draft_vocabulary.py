"""The ids from which drafts are chosen, as `draft_vocab` sets them; no torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from compiled_mtp.errors import check, fail, quote, shown

# Some thirty times what all ids of a large vocabulary take. A limit, because a device file may never end.
_MOST_CHARACTERS = 2**26
_MAKE_ONE = "make one with `compiled-mtp rank-vocabulary`"


def read_ids(path: Path, num_valid_ids: int) -> list[int]:
    """The ids in a file, one per line or as a JSON list, in the file's order.

    Raises ValueError, naming draft_vocab, for a file that cannot be read, that has no ids, an entry that is
    no id, an id twice, or an id of num_valid_ids or more.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARACTERS + 1)
    except (OSError, ValueError) as error:  # ValueError: text that is no UTF-8, a path with a null byte.
        rule = "be a number of ids or a readable file of ids"
        why = getattr(error, "strerror", None) or error
        raise fail("draft_vocab", rule, f"{quote(str(path))}: {why}", _MAKE_ONE) from None
    rule = f"name a file of at most {_MOST_CHARACTERS} characters"
    check(len(text) <= _MOST_CHARACTERS, "draft_vocab", rule, f"more in {path}", _MAKE_ONE)
    text = text.strip()
    entries: object
    try:
        entries = json.loads(text) if text.startswith("[") else [json.loads(e) for e in text.split()]
    except (ValueError, RecursionError) as error:
        rule = "name a file with one id per line or a JSON list of ids"
        why = getattr(error, "strerror", None) or error
        raise fail("draft_vocab", rule, f"{quote(str(path))}: {why}", _MAKE_ONE) from None
    ids: list[int] = []
    seen: set[int] = set()
    assert isinstance(entries, list)
    for entry in entries:
        # Compare types, because a bool is an int.
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
    """The ids from which drafts are chosen, ascending, None for all; eos ids are always included.

    Raises ValueError for more than num_valid_ids, and as `read_ids` does.
    """
    if draft_vocab is None:
        return None
    if isinstance(draft_vocab, int):
        rule = f"be at most {num_valid_ids}, the ids of this checkpoint"
        check(draft_vocab <= num_valid_ids, "draft_vocab", rule, draft_vocab, "leave it out for all of them")
    named = range(draft_vocab) if isinstance(draft_vocab, int) else read_ids(draft_vocab, num_valid_ids)
    ids = {*named, *(i for i in eos_token_ids if i < num_valid_ids)}
    return None if len(ids) == num_valid_ids else tuple(sorted(ids))
