"""What the operators that draw tokens and that commit them both know of a slot's sampling."""

from __future__ import annotations

# Bits of the table `features`: which of a slot's larger tables say anything.
PENALTIES, BIAS, STOP_IDS, BAD_WORDS = 1, 2, 4, 8
RECENT_IDS = 16
"""Emitted ids that a slot remembers, by position modulo this; the longest bad word."""
# What drawing a row's token has come to.
NOT_FINITE, DRAWN, ALL_MASKED = 0, 1, 2
