"""The errors of operators: what is wrong with an argument's shape, dtype or layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS


def fail(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """The one form of our argument errors, to be raised by the caller."""
    return ValueError(f"{name} must {rule}, got {got}; {remedy}")


def is_known(size: int) -> bool:
    """Whether a size is a number, and no expression of a batch size that a program leaves open."""
    return isinstance(size, int)


def wrong_shape(
    name: str, tensor: torch.Tensor, dims: tuple[str, ...], sizes: Mapping[str, Any], remedy: str
) -> ValueError:
    """`tensor` has not the shape `dims`; what `sizes` does not know stands as it is."""

    def wanted(dim: str) -> str:
        if dim == "...":
            return dim
        try:
            return str(eval(dim, {}, dict(sizes)))
        except (NameError, SyntaxError):
            return dim

    shape = ", ".join(" or ".join(map(wanted, dim.split("|"))) for dim in dims)
    return fail(name, f"have shape [{shape}]", list(tensor.shape), remedy)


def wrong_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> ValueError:
    """`tensor` has none of `dtypes`."""
    return fail(name, f"have dtype {' or '.join(map(str, dtypes))}", tensor.dtype, "cast it")


def wrong_layout(name: str, tensor: torch.Tensor, is_contiguous: bool) -> ValueError:
    """`tensor` does not lie as a kernel reads it."""
    rule = "be contiguous" if is_contiguous else "have a last dimension of stride 1"
    return fail(name, rule, list(tensor.stride()), "make it contiguous")


def check_pieces(count: int) -> None:
    """Raise ValueError for a number of pieces of prompts that no launch has."""
    if not 1 <= count <= MAX_PROMPT_CHUNKS:
        raise fail("pieces", f"be 1 to {MAX_PROMPT_CHUNKS}", count, "share them out among launches")
