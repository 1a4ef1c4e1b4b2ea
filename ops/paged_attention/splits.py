"""Cuts keys into splits for the verify route: a split's size depends on its absolute position."""

# (end, keys per split): short splits first, because a short context keeps few programs busy and waits for the
# longest of them; long splits later, because each costs a write and a read of its partial sums. Splits longer
# than 512 keys would not divide evenly among the programs: with one request of 65,536 keys and four heads,
# some program would get one and a half times its share.
SPLIT_SIZES = ((1024, 64), (4096, 128), (32768, 256), (1 << 31, 512))
# From this number of (request, kv head) pairs on, an item is a prefix of a request's splits, often all.
PREFIXED_ITEMS = 64
# The most programs that share such items: at least two for each processor of an H200 and of a B200.
PREFIX_PROGRAMS = 320


def count_splits(num_keys: int) -> int:
    """Return the number of splits that the first `num_keys` keys reach into."""
    count, begin = 0, 0
    for end, size in SPLIT_SIZES:
        count += max(0, -(-(min(num_keys, end) - begin) // size))
        begin = end
    return count


def count_partials(num_requests: int, num_keys: int, kv_heads: int) -> int:
    """Return the most partials that `num_requests` requests of up to num_keys keys have together, for each
    row of a window and head.
    """
    splits = count_splits(num_keys)
    if num_requests * kv_heads < PREFIXED_ITEMS:
        return num_requests * splits
    # A prefix has at least a program's share of all keys if there is a program for each, else half of one
    # (`find_prefix`). So m requests of n keys have at most m * (S(n) - S(m * n * kv_heads / shares)) splits
    # after it, S being `count_splits`. S is concave: that is at most m * (1 - m * kv_heads / shares) * S(n).
    # A prefix ends with a whole split, so it may lack one.
    shares = PREFIX_PROGRAMS if 2 * num_requests * kv_heads <= PREFIX_PROGRAMS else 2 * PREFIX_PROGRAMS
    most = min(num_requests, -(-shares // (2 * kv_heads)))
    after = most * splits * (shares - most * kv_heads) // shares
    return min(num_requests * splits, 2 * num_requests + after)
