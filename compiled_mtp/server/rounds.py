"""The fields that `include_drafts` adds to a choice: its tokens and the drafts of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.request import RoundDrafts


def round_fields(
    tokenizer: Tokenizer, token_ids: Sequence[int], rounds: Sequence[RoundDrafts]
) -> dict[str, Any]:
    """Return `tokens`, and `rounds` with the drafts of each round, how many of them were accepted, and their
    source: "lookup" (the request's own text) or "mtp".

    The first `accepted` drafts of a round are its first tokens; its last token is the bonus token.
    """
    return {
        "tokens": [_token(tokenizer, token_id) for token_id in token_ids],
        "rounds": [
            {
                "drafts": [_token(tokenizer, i) for i in one.token_ids],
                "accepted": one.num_accepted,
                "source": "lookup" if one.is_looked_up else "mtp",
            }
            for one in rounds
        ],
    }


def _token(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """Return a token's id, text and bytes; a special token has its name as text and no bytes."""
    found = tokenizer.token_bytes(token_id)
    text = found.decode("utf-8", "replace") if found else tokenizer.name_of(token_id)
    return {"id": token_id, "token": text, "bytes": list(found)}
