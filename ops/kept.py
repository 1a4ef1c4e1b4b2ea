"""Caches what an operator computes from weights, with the weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def kept(make: Callable[..., Tensor], weight: Tensor, *others: Tensor) -> Tensor:
    """Return `make(weight, *others)`, computed again only if an argument was written to or replaced.

    The result is an attribute of `weight`: use one `make` per first weight.
    """
    versions = [_version(tensor) for tensor in (weight, *others)]
    found: tuple[list[int], tuple[Tensor, ...], Tensor] | None = getattr(weight, "kept", None)
    if found is not None and found[0] == versions and all(map(_is_same, found[1], others)):
        return found[2]
    made = make(weight, *others)
    setattr(weight, "kept", (versions, others, made))  # noqa: B010
    return made


def forget_kept(weight: Tensor) -> None:
    """Forget what is kept with a weight whose values were replaced through another tensor of its memory."""
    setattr(weight, "kept", None)  # noqa: B010


def _version(tensor: Tensor) -> int:
    """Return how often the tensor was written to; -1 for an inference tensor, which does not count writes."""
    return -1 if tensor.is_inference() else tensor._version


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other
