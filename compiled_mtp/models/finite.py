"""Whether weights are numbers at all: a check at load, where the tensor can still be named."""

from __future__ import annotations

from collections.abc import Mapping

import torch


@torch.no_grad()
def check_finite(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError that names the parameters with an element that is NaN or infinite.

    One reduction a tensor where it lies, and one look at all results. Takes no memory but for FP8.
    """
    if not parameters:
        return
    flags = torch.stack([_is_finite(tensor) for tensor in parameters.values()]).tolist()
    wrong = [name for name, is_finite in zip(parameters, flags, strict=True) if not is_finite]
    if wrong:
        raise ValueError(
            f"weights must be finite, got NaN or infinity in {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}; check the checkpoint's files, "
            "or whether its numbers fit dtype"
        )


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """A bool [] on the tensor's device."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype == torch.float8_e4m3fn:
        # It has no infinity, and one NaN of either sign: all bits but the sign's.
        return ((tensor.view(torch.uint8) & 0x7F) != 0x7F).all()
    # A NaN is passed on by both ends.
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()
