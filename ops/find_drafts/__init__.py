"""Drafts from the text: what stood after the last place where a request's last tokens stood before."""

from compiled_mtp.ops.find_drafts.reference import (
    FIRST_CHAIN_KEPT,
    FIRST_THRESHOLD,
    LEAST_MATCH,
    LEAST_THRESHOLD,
    MOST_MATCH,
    MOST_THRESHOLD,
    Found,
    LookupState,
    find_drafts,
)

__all__ = [
    "FIRST_CHAIN_KEPT",
    "FIRST_THRESHOLD",
    "LEAST_MATCH",
    "LEAST_THRESHOLD",
    "MOST_MATCH",
    "MOST_THRESHOLD",
    "Found",
    "LookupState",
    "find_drafts",
]
