"""Cuts keys into splits for the verify route: a split's size depends on its absolute position."""

# (end, keys per split): short splits first, because a short context keeps few programs busy and waits for the
# longest of them; long splits later, because each costs a write and a read of its partial sums. Splits longer
# than 512 keys would not divide evenly among the programs: with one request of 65,536 keys and four heads,
# some program would get one and a half times its share. Each size ends with a whole group of GROUP_SPLITS.
GROUP_SPLITS = 4
SPLIT_SIZES = ((1024, 64), (4096, 128), (32768, 256), (1 << 31, 512))


def count_splits(num_keys: int) -> int:
    """Return the number of splits that the first `num_keys` keys reach into."""
    count, begin = 0, 0
    for end, size in SPLIT_SIZES:
        count += max(0, -(-(min(num_keys, end) - begin) // size))
        begin = end
    return count
