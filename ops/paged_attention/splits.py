"""Cuts keys into splits for the verify route: a split's size depends on its absolute position."""

# (end, keys per split): short splits first, because a short context keeps few programs busy and waits for the
# longest of them; long splits later, because each costs a write and a read of its partial sums. Splits longer
# than 512 keys would not divide evenly among the programs: with one request of 65,536 keys and four heads,
# some program would get one and a half times its share. Each size ends with a whole group of GROUP_SPLITS.
GROUP_SPLITS = 4
SPLIT_SIZES = ((1024, 64), (4096, 128), (32768, 256), (1 << 31, 512))
# From this number of (request, kv head, row tile) triples on, an item may be a whole group of splits.
GROUPED_ITEMS = 64
# The most programs that share the items: twice what any GPU runs at once.
MOST_PROGRAMS = 1024


def count_splits(num_keys: int) -> int:
    """Return the number of splits that the first `num_keys` keys reach into."""
    count, begin = 0, 0
    for end, size in SPLIT_SIZES:
        count += max(0, -(-(min(num_keys, end) - begin) // size))
        begin = end
    return count


def count_partials(num_requests: int, num_keys: int, kv_heads: int, has_groups: bool) -> int:
    """Return the most partials, of splits or of groups of splits, that `num_requests` requests of up to
    num_keys keys have together, for each row of a window and head.

    has_groups: items may be whole groups. They are unless the requests have so few keys together that groups
    would not keep the programs busy (`splits_an_item`); their splits are then few too.
    """
    splits = count_splits(num_keys)
    if not has_groups:
        return num_requests * splits
    size = next(size for end, size in SPLIT_SIZES if num_keys <= end)
    # Fewer keys than this are not grouped. Splits have at least the keys of the first ones, and each request
    # has an incomplete one.
    most_keys = MOST_PROGRAMS * GROUP_SPLITS * size // (2 * kv_heads)
    apart = num_requests + -(-most_keys // SPLIT_SIZES[0][1])
    return max(num_requests * -(-splits // GROUP_SPLITS), min(num_requests * splits, apart))
