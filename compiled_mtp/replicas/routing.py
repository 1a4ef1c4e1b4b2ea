"""Which replica a request would rather have: prompts that begin alike go where their beginning is cached."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def prefix_key(
    token_ids: Sequence[int], *, chunk: int, num_chunks: int, salt: str | None = None
) -> str | None:
    """Return what prompts share whose first `num_chunks` chunks of `chunk` tokens, and salts, are equal.

    None for a prompt that is not longer than those: nothing of it that others share would be cached whole.
    """
    length = chunk * num_chunks
    if len(token_ids) <= length:
        return None
    text = " ".join(map(str, token_ids[:length]))
    return hashlib.blake2b(f"{salt or ''}\n{text}".encode(), digest_size=16).hexdigest()


def rank(key: str, replica_ids: Sequence[str]) -> list[str]:
    """Return the replicas in the order in which a key would have them.

    A replica that comes or goes moves only the keys that it has or had. Source: Thaler and Ravishankar, "A
    name-based mapping scheme for rendezvous", 1996.
    """
    return sorted(
        replica_ids,
        key=lambda one: hashlib.blake2b(f"{key} {one}".encode(), digest_size=8).digest(),
        reverse=True,
    )


def prefer(key: str | None, loads: Mapping[str, int], max_imbalance: int) -> str | None:
    """Return the replica for a key: the first in its order with at most `max_imbalance` requests more than
    the least loaded one. None without a key: then any will do.

    loads: requests that each replica has, at least one replica.
    """
    if key is None:
        return None
    most = min(loads.values()) + max_imbalance
    return next(one for one in rank(key, list(loads)) if loads[one] <= most)
