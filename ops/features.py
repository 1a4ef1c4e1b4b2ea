"""Constants of a slot's sampling tables that the operators `sample` and `window` share."""

from __future__ import annotations

# Bits of the table `features`: which of a slot's larger tables are in use.
PENALTIES, BIAS, STOP_IDS, BAD_WORDS = 1, 2, 4, 8
RECENT_IDS = 16
"""How many emitted ids a slot keeps, by position modulo this; also the length of the longest bad word."""
# Outcomes of drawing a row's token.
NOT_FINITE, DRAWN, ALL_MASKED = 0, 1, 2
