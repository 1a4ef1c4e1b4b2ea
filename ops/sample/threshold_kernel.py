"""Device functions that find the smallest value a filter keeps, without a sort.

A threshold is the key of a value: its bits, ordered as integers and counted from the lowest, 0 .. 2^32 - 1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """Return int32 keys in the order of float32 values; -0.0 counts as 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_of_offset(threshold):
    """Return the int32 key of a threshold, which counts from the lowest key."""
    return (threshold - 2147483648).to(tl.int32)


@triton.jit
def tempered(x, peak, temperature):
    """Return (x - peak) / temperature; at low temperatures x / temperature may overflow or lose bits."""
    return tl.div_rn(x - peak, tl.zeros_like(x) + temperature)


@triton.jit
def candidates(
    processed,
    groups,
    num_groups,
    chunk,
    row_peak,
    temperature,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
):
    """Load the tempered values of one chunk of the listed groups, -inf beyond the list."""
    entry = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
    group = tl.load(groups + entry, mask=entry < num_groups, other=0)
    at = processed + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(at, mask=(entry < num_groups)[:, None], other=float("-inf"))
    return tempered(tl.reshape(x, (CHUNK_GROUPS * GROUP,)), row_peak, temperature)


@triton.jit
def weigh(x, peak, is_mass, threshold, step):
    """Return each value's weight, and whether it reaches threshold + r * 4^step for r = 1, 2, 3.

    The weight is exp(x - peak) if is_mass, else 1; -inf reaches no threshold.
    """
    key = key_of(x)
    unit = tl.full((), 1, tl.int64) << (2 * step)
    is_value = x > float("-inf")
    reach1 = is_value & (key >= key_of_offset(threshold + unit))
    reach2 = is_value & (key >= key_of_offset(threshold + 2 * unit))
    reach3 = is_value & (key >= key_of_offset(threshold + 3 * unit))
    return tl.where(is_mass, tl.exp(x - peak), 1.0), reach1, reach2, reach3


@triton.jit
def add_up(mass1, mass2, mass3, number1, number2, number3, SIZE: tl.constexpr):
    """Return the six sums by one reduction: [8] = 0, mass1, mass2, mass3, 0, number1, number2, number3."""
    zero = tl.zeros((SIZE,), tl.float32)
    even = tl.join(tl.join(zero, zero), tl.join(mass2, number2))
    odd = tl.join(tl.join(mass1, number1), tl.join(mass3, number3))
    return tl.sum(tl.reshape(tl.join(even, odd), (SIZE, 8)), 0)


@triton.jit
def take_digit(sums, target, above, mass_end, number_end, number_low):
    """Find the largest r of 0..3 at which `sums` plus `above`, the mass of larger values, reach the target.

    Returns r, mass and number of the values from the new interval's end on, and the number from its start.
    """
    r = tl.arange(0, 8)
    digit = tl.sum(((r > 0) & (r < 4) & (sums + above >= target)).to(tl.int32), 0)
    number_low = tl.where(digit > 0, tl.sum(tl.where(r == digit + 4, sums, 0.0), 0), number_low)
    mass_end = tl.where(digit < 3, tl.sum(tl.where(r == digit + 1, sums, 0.0), 0), mass_end)
    number_end = tl.where(digit < 3, tl.sum(tl.where(r == digit + 5, sums, 0.0), 0), number_end)
    return digit, mass_end, number_end, number_low


@triton.jit
def search(x, peak, target, above, is_mass, threshold, step, last_step, SIZE: tl.constexpr):
    """Find the largest threshold whose mass reaches the target, among values in registers, two bits per step.

    `above` is the mass of values that are not in x and reach every threshold tried. Stops early when a single
    value is left in the interval.
    """
    mass_end = 0.0
    number_end = 0.0
    number_low = SIZE + 2.0
    step += tl.full((), 0, tl.int32)  # a literal cannot be the variable of a loop
    while (step >= last_step) & (number_low - number_end > 1.0):
        weight, reach1, reach2, reach3 = weigh(x, peak, is_mass, threshold, step)
        sums = add_up(
            tl.where(reach1, weight, 0.0),
            tl.where(reach2, weight, 0.0),
            tl.where(reach3, weight, 0.0),
            reach1.to(tl.float32),
            reach2.to(tl.float32),
            reach3.to(tl.float32),
            SIZE,
        )
        digit, mass_end, number_end, number_low = take_digit(
            sums, target, above, mass_end, number_end, number_low
        )
        threshold += digit.to(tl.int64) << (2 * step)
        step -= 1
    return threshold


@triton.jit
def fine_threshold(
    processed,
    groups,
    num_groups,
    interval,
    row_peak,
    temperature,
    peak,
    target,
    floor,
    is_mass,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
):
    """Find the largest threshold whose mass reaches the target, among the listed groups' values from `floor`.

    While more than one chunk of values is left in the search interval, every step reads the groups. The
    remaining values are then gathered in `interval` and searched in registers.
    """
    SIZE: tl.constexpr = GROUP * CHUNK_GROUPS
    lane = tl.arange(0, SIZE)
    num_chunks = tl.cdiv(num_groups, CHUNK_GROUPS)
    floor_key = key_of_offset(floor)
    # Start at the first digit in which the peak and the floor differ.
    step = 15
    while (step > 0) & ((((key_of(peak).to(tl.int64) + 2147483648) ^ floor) >> (2 * step)) == 0):
        step -= 1
    threshold = (floor >> (2 * step + 2)) << (2 * step + 2)
    mass_end = 0.0
    number_end = 0.0
    x = candidates(processed, groups, num_groups, 0, row_peak, temperature, GROUP, CHUNK_GROUPS)
    x = tl.where(key_of(x) >= floor_key, x, float("-inf"))
    if num_chunks > 1:
        # Until a digit is not 0 this is an upper bound. It must not be too low: `interval` holds SIZE values.
        number_low = (num_groups * GROUP).to(tl.float32)
        while (step >= 0) & (number_low - number_end > SIZE):
            mass1 = tl.zeros((SIZE,), tl.float32)
            mass2 = tl.zeros((SIZE,), tl.float32)
            mass3 = tl.zeros((SIZE,), tl.float32)
            numbers = tl.zeros((SIZE,), tl.int32)  # three counts, 10 bits each
            for chunk in tl.range(num_chunks, loop_unroll_factor=2):
                x = candidates(
                    processed, groups, num_groups, chunk, row_peak, temperature, GROUP, CHUNK_GROUPS
                )
                x = tl.where(key_of(x) >= floor_key, x, float("-inf"))
                weight, reach1, reach2, reach3 = weigh(x, peak, is_mass, threshold, step)
                mass1 += tl.where(reach1, weight, 0.0)
                mass2 += tl.where(reach2, weight, 0.0)
                mass3 += tl.where(reach3, weight, 0.0)
                numbers += tl.where(reach1, 1, 0) + tl.where(reach2, 1 << 10, 0)
                numbers += tl.where(reach3, 1 << 20, 0)
            sums = add_up(
                mass1,
                mass2,
                mass3,
                (numbers & 1023).to(tl.float32),
                ((numbers >> 10) & 1023).to(tl.float32),
                (numbers >> 20).to(tl.float32),
                SIZE,
            )
            digit, mass_end, number_end, number_low = take_digit(
                sums, target, 0.0, mass_end, number_end, number_low
            )
            threshold += digit.to(tl.int64) << (2 * step)
            step -= 1
        if step >= 0:
            first = tl.maximum(key_of_offset(threshold), floor_key)
            last = key_of_offset(threshold + (tl.full((), 4, tl.int64) << (2 * step)) - 1)
            filled = 0
            tl.debug_barrier()  # an earlier search may still be reading the interval
            for chunk in range(num_chunks):
                x = candidates(
                    processed, groups, num_groups, chunk, row_peak, temperature, GROUP, CHUNK_GROUPS
                )
                is_inside = (key_of(x) >= first) & (key_of(x) <= last) & (x > float("-inf"))
                count = is_inside.to(tl.int32)
                tl.store(interval + filled + tl.cumsum(count, 0) - 1, x, mask=is_inside)
                filled += tl.sum(count, 0)
            tl.debug_barrier()
            x = tl.load(interval + lane, mask=lane < filled, other=float("-inf"))
    threshold = search(x, peak, target, mass_end, is_mass, threshold, step, 0, SIZE)
    return tl.maximum(threshold, floor)
