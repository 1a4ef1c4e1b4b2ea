"""The ValueErrors that operators raise for an argument of a wrong shape, dtype or layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS


def fail(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """Return an argument error in the form that all of them have; the caller raises it."""
    return ValueError(f"{name} must {rule}, got {got}; {remedy}")


def is_known(size: int) -> bool:
    """Return whether a size is a number, not an expression of a batch size that a program leaves open."""
    return isinstance(size, int)


def wrong_shape(
    name: str, tensor: torch.Tensor, dims: tuple[str, ...], sizes: Mapping[str, Any], remedy: str
) -> ValueError:
    """Return the error that `tensor` does not have the shape `dims`.

    Each dimension that `sizes` determines is shown as a number, any other as its name.
    """

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
    """Return the error that `tensor` has none of `dtypes`."""
    return fail(name, f"have dtype {' or '.join(map(str, dtypes))}", tensor.dtype, "cast it")


def wrong_layout(name: str, tensor: torch.Tensor, is_contiguous: bool) -> ValueError:
    """Return the error that `tensor` has strides that kernels cannot read."""
    rule = "be contiguous" if is_contiguous else "have a last dimension of stride 1"
    return fail(name, rule, list(tensor.stride()), "make it contiguous")


def check_prompt_chunks(count: int) -> None:
    """Raise ValueError unless one launch can take `count` prompt chunks."""
    if not 1 <= count <= MAX_PROMPT_CHUNKS:
        raise fail("prompt chunks", f"be 1 to {MAX_PROMPT_CHUNKS}", count, "use several launches")
