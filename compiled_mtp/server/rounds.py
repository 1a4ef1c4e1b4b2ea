"""What choices say of their rounds to whoever asks with `include_drafts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.request import RoundDrafts


def round_fields(
    tokenizer: Tokenizer, token_ids: Sequence[int], rounds: Sequence[RoundDrafts]
) -> dict[str, Any]:
    """Return `tokens`, which `rounds` gave, and of each of these the drafts and how many were kept.

    The first `accepted` drafts of a round are its first tokens; the token behind them is the target's own.
    """
    return {
        "tokens": [_token(tokenizer, token_id) for token_id in token_ids],
        "rounds": [
            {"drafts": [_token(tokenizer, i) for i in one.token_ids], "accepted": one.num_accepted}
            for one in rounds
        ],
    }


def _token(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """A special token has its name and no bytes: texts do not hold it."""
    found = tokenizer.token_bytes(token_id)
    text = found.decode("utf-8", "replace") if found else tokenizer.name_of(token_id)
    return {"id": token_id, "token": text, "bytes": list(found)}
