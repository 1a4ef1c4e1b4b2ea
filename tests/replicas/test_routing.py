"""The replica that a prompt prefers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_mtp.replicas.routing import prefer, prefix_key, rank
from compiled_mtp.vision.images import PreparedImage

NAMES = [f"replica-{i}" for i in range(8)]


def test_prompts_that_begin_alike_share_a_key() -> None:
    shared = list(range(128))
    key = prefix_key([*shared, 1], chunk=64, num_chunks=2)
    assert key == prefix_key([*shared, 2, 3], chunk=64, num_chunks=2) is not None
    assert key != prefix_key([*shared[:-1], 0, 1], chunk=64, num_chunks=2)
    # Prompts of other salts share no cached prefix.
    assert key != prefix_key([*shared, 1], chunk=64, num_chunks=2, salt="s")
    # A prompt leaves nothing in the cache unless a whole chunk comes before its last token.
    assert prefix_key(shared, chunk=64, num_chunks=2) is None
    assert prefix_key([1, 2], chunk=64, num_chunks=1) is None


def test_prompts_with_other_images_have_other_keys() -> None:
    pad = 9

    def key(ids: list[int], *digests: bytes) -> str | None:
        images = [PreparedImage(5, 8, b"", digest) for digest in digests]
        return prefix_key(ids, chunk=64, num_chunks=1, images=images, image_token_id=pad)

    # Two images of 40 tokens with text between, of which the first chunk has 18 of the second's.
    ids = [1, 2, *[pad] * 40, 3, 4, 5, 6, *[pad] * 40, 7]
    assert key(ids, b"a", b"b") == key([*ids, 8], b"a", b"b") is not None
    assert len({key(ids, b"a", b"b"), key(ids, b"b", b"a"), key(ids, b"a", b"c"), key(ids, b"c", b"b")}) == 4
    # The chunk does not reach the second.
    later = [1, *[pad] * 40, *range(100, 123), *[pad] * 40, 7]
    assert key(later, b"a", b"b") == key(later, b"a", b"c") != key(later, b"c", b"b")
    assert key(list(range(100, 180))) == prefix_key(range(100, 180), chunk=64, num_chunks=1)


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=8), st.sets(st.sampled_from(NAMES), min_size=2))
def test_a_replica_that_goes_moves_only_its_own_keys(key: str, names: set[str]) -> None:
    order = rank(key, sorted(names))
    assert order == rank(key, sorted(names, reverse=True))
    for gone in names:
        assert rank(key, sorted(names - {gone})) == [name for name in order if name != gone]


def test_keys_are_spread() -> None:
    first = [rank(str(i), NAMES)[0] for i in range(800)]
    assert min(first.count(name) for name in NAMES) > 60


def test_a_loaded_replica_is_passed_over() -> None:
    order = rank("key", NAMES)
    loads = dict.fromkeys(NAMES, 3)
    assert prefer("key", loads, 4) == order[0]
    assert prefer("key", loads | {order[0]: 7}, 4) == order[0]
    assert prefer("key", loads | {order[0]: 8}, 4) == order[1]
    assert prefer("key", loads | {order[0]: 8, order[1]: 9}, 4) == order[2]
    assert prefer("key", {order[0]: 9}, 0) == order[0]
    assert prefer(None, loads, 4) is None
