"""Where the verify route cuts keys into splits: sizes by absolute position, and how many there are."""

# (first key beyond, keys a split): short splits first, since a short context has few programs at work and
# waits for its longest; long ones later, since every split costs a write and a read of its partial sums. With
# longer ones than the last a few requests could not be shared out evenly: of one with 65,536 keys and four
# heads some program would have half as much again as its part. A size ends behind whole groups.
GROUP_SPLITS = 4
SPLIT_SIZES = ((1024, 64), (4096, 128), (32768, 256), (1 << 31, 512))


def count_splits(num_keys: int) -> int:
    """Splits that `num_keys` keys from position 0 reach into."""
    count, begin = 0, 0
    for end, size in SPLIT_SIZES:
        count += max(0, -(-(min(num_keys, end) - begin) // size))
        begin = end
    return count
