"""Which replica a request prefers: prompts that begin alike go to the replica that caches their beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from compiled_mtp.vision.images import PreparedImage


def prefix_key(
    token_ids: Sequence[int],
    *,
    chunk: int,
    num_chunks: int,
    salt: str | None = None,
    images: Sequence[PreparedImage] = (),
    image_token_id: int | None = None,
) -> str | None:
    """Return a key that is equal for prompts of one salt whose first `num_chunks` * `chunk` tokens, and the
    images that these touch, are equal.

    token_ids has a pad, image_token_id, for each token of an image: pads alone are alike for all images. None
    for a prompt that is not longer than those tokens: the prefix cache would not have all of them.
    """
    length = chunk * num_chunks
    if len(token_ids) <= length:
        return None
    text = " ".join(map(str, token_ids[:length]))
    num_pads, digests = token_ids[:length].count(image_token_id), b""
    for image in images:
        if num_pads <= 0:
            break
        digests += image.digest
        num_pads -= image.rows * image.columns
    return hashlib.blake2b(f"{salt or ''}\n{text}".encode() + digests, digest_size=16).hexdigest()


def rank(key: str, replica_ids: Sequence[str]) -> list[str]:
    """Return the replicas in the key's order of preference.

    A replica that is added or removed moves only its own keys. Source: Thaler and Ravishankar, "A name-based
    mapping scheme for rendezvous", 1996.
    """
    return sorted(
        replica_ids,
        key=lambda one: hashlib.blake2b(f"{key} {one}".encode(), digest_size=8).digest(),
        reverse=True,
    )


def prefer(key: str | None, loads: Mapping[str, int], max_imbalance: int) -> str | None:
    """Return the replica for a key, None (any replica) without a key.

    It is the first in the key's order with at most `max_imbalance` requests more than the least loaded one.
    loads: requests of each replica, of one replica or more.
    """
    if key is None:
        return None
    most = min(loads.values()) + max_imbalance
    return next(one for one in rank(key, list(loads)) if loads[one] <= most)
