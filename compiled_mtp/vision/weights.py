"""Loads the vision tower's weights, which no release quantises."""

from __future__ import annotations

from pathlib import Path

import torch

from compiled_mtp.errors import check, shown
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.models.comparison import first_few
from compiled_mtp.models.finite import find_not_finite
from compiled_mtp.models.headers import Header, read_visual_headers
from compiled_mtp.vision.tower import VisionTower, empty_tower

_FLOATS = ("BF16", "F16", "F32")


def check_tower(config: VisionConfig, path: Path) -> dict[str, Header]:
    """Return the stored tensors of the tower in the checkpoint folder `path`, by the parameters' names.

    Raises ValueError that names the first tensors that are missing, unused, or of another shape or dtype.
    """
    meta = empty_tower(config, torch.float32, torch.device("meta"))
    headers, parameters = read_visual_headers(path), dict(meta.named_parameters())
    wrong = [
        f"{shown(header.name)} of {shown(header.dtype)} {shown(list(header.shape))}"
        for name, header in headers.items()
        if name in parameters
        and (header.dtype not in _FLOATS or _flat(header.shape) != _flat(parameters[name].shape))
    ]
    kinds = (
        ("missing", [name for name in parameters if name not in headers]),
        ("unused", [header.name for name, header in headers.items() if name not in parameters]),
        ("misfitting", wrong),
    )
    problems = [f"{kind}: {first_few(names)}" for kind, names in kinds if names]
    rule = "be those of the vision_config in config.json"
    remedy = "download the checkpoint again, or start without max_images"
    check(not problems, "model.visual.*", rule, "; ".join(problems), remedy)
    return headers


@torch.no_grad()
def load_tower(
    config: VisionConfig, path: Path, dtype: torch.dtype, device: torch.device, *, is_checked: bool
) -> VisionTower:
    """Return the tower of the checkpoint folder `path`.

    is_checked: search its parameters for NaN and infinity. Raises ValueError as `check_tower` does, before
    anything is allocated, and for weights that are not finite.
    """
    headers = check_tower(config, path)
    tower = empty_tower(config, dtype, device)
    parameters = dict(tower.named_parameters())
    for name, header in headers.items():
        parameters[name].copy_(header.read_whole(device).reshape(parameters[name].shape))
    wrong = find_not_finite(parameters) if is_checked else []
    remedy = "check the checkpoint's files"
    check(not wrong, "model.visual.*", "be finite", f"NaN or infinity in {first_few(wrong)}", remedy)
    return tower


def _flat(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    """A shape with one number for the columns: a convolution over whole patches is a matrix."""
    columns = 1
    for size in shape[1:]:
        columns *= size
    return (*shape[:1], columns)
