"""The weights in a checkpoint's files, quantised or plain, under the names of plain weights.

The stored tensors decide: a linear X is quantised if its packed tensor is stored (`X.qweight`,
`X.weight_packed`, or an `X.weight` of a packed dtype with its scales), whatever config.json lists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from compiled_mtp.errors import check
from compiled_mtp.gguf.container import read_container
from compiled_mtp.gguf.tensors import StoredTensor, stored_tensors
from compiled_mtp.models.formats.awq import AWQ
from compiled_mtp.models.formats.claims import read_claims
from compiled_mtp.models.formats.fp4 import MXFP4, NVFP4, ModeloptNVFP4
from compiled_mtp.models.formats.gptq import GPTQ
from compiled_mtp.models.formats.mxfp8 import MXFP8
from compiled_mtp.models.formats.pack_quantized import PackQuantized
from compiled_mtp.models.formats.scaled_bytes import ScaledBytes
from compiled_mtp.models.formats.weight import PackedWeight
from compiled_mtp.models.headers import Header, read_headers
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import FP8

# A linear's format is the first of these whose `marks` accepts its tensors.
FORMATS: tuple[type[PackedWeight], ...] = (
    *(AWQ, GPTQ, MXFP4, NVFP4, PackQuantized, ModeloptNVFP4, MXFP8, ScaledBytes),
)
# Names of tensors that mark a linear as quantised if they have one of these dtypes; None for any dtype.
_MARKERS: Mapping[str, tuple[str, ...] | None] = {
    "qweight": None,
    "weight_packed": None,
    "weight": ("U8", "I8", FP8.header_dtype),
}
_SUFFIXES = tuple(
    dict.fromkeys(s for form in FORMATS for s in (*form.required, *form.optional, *form.unread))
)
# Scales of an FP8 KV cache, which are not used: kv_dtype computes scales of its own.
_SKIPPED = re.compile(r"\.self_attn\.(k_proj\.k|v_proj\.v|[kv]_proj\.output|k|v)_scale$")


def read_stored(root: Path) -> dict[str, StoredWeight]:
    """The weights in the folder or GGUF file `root`, by name without the trunk's prefix, in the files' order.

    Quantised linears have the name `X.weight`, and factors of FP8 in blocks of 128 the name that the FP8
    releases use, `X.weight_scale_inv`. Reads headers and a few numbers of quantised linears. Raises
    ValueError as `read_headers` does, for a quantised linear with a missing or unfitting tensor, and for a
    format that is not supported.
    """
    if root.suffix == ".gguf":
        return dict(stored_tensors(read_container(root)))
    headers = {name: _without_axes(header) for name, header in read_headers(root).items()}
    claims = read_claims(root)
    packed: dict[str, StoredWeight] = {}
    renamed: dict[str, str] = {}
    parts_of: dict[str, str] = {}
    for name, header in headers.items():
        module, _, suffix = name.rpartition(".")
        dtypes = _MARKERS.get(suffix, ())
        if dtypes is not None and header.dtype not in dtypes:
            continue
        parts = {s: headers[full] for s in _SUFFIXES if (full := f"{module}.{s}") in headers}
        form = next((form for form in FORMATS if form.marks(parts)), None)
        if form is None:
            continue
        others = [parts[s].name for s in _MARKERS if s in parts and s != suffix]
        rule, remedy = "be stored in one format", f"remove {header.name} or the others"
        check(not others, header.name, rule, f"{', '.join(others)} too", remedy)
        own = (*form.required, *form.optional, *form.unread)
        if form is ScaledBytes and _is_in_blocks(parts):
            renamed[f"{module}.weight_scale"] = f"{name}{FP8.scale_suffix}"
            parts_of[f"{module}.input_scale"] = name
        else:
            packed[name] = form({s: header for s, header in parts.items() if s in own}, claims)
            parts_of |= {f"{module}.{s}": name for s in own}
    stored: dict[str, StoredWeight] = {}
    for name, header in headers.items():
        if name in packed:
            stored[f"{name.rpartition('.')[0]}.weight"] = packed[name]
        elif name not in parts_of and not _SKIPPED.search(name):
            stored[renamed.get(name, name)] = header
    return stored


def _without_axes(header: Header) -> Header:
    """The factors of blocks as a grid, which modelopt stores as [N / 128, 1, K / 128, 1].

    Other tensors are returned as they are.
    """
    is_grid = header.name.endswith(".weight_scale") and len(header.shape) == 4
    if is_grid and header.shape[1] == header.shape[3] == 1:
        return replace(header, shape=(header.shape[0], header.shape[2]))
    return header


def _is_in_blocks(parts: Mapping[str, Header]) -> bool:
    """Whether FP8 values have a factor per block, instead of one per row or one in all."""
    shape, scale = parts["weight"].shape, parts["weight_scale"].shape
    is_fp8 = parts["weight"].dtype == FP8.header_dtype
    is_grid = len(shape) == 2 and scale == FP8.scale_shape(shape)
    return is_fp8 and is_grid and scale not in ((1, 1), (shape[0], 1))


def check_packed(weights: Iterable[StoredWeight]) -> None:
    """Raise ValueError for a quantised linear with stored numbers that its format does not allow."""
    for weight in weights:
        if isinstance(weight, PackedWeight):
            weight.check_values()


def is_packed(weight: StoredWeight) -> bool:
    """Whether `weight` is quantised in a format that the loader multiplies out."""
    if isinstance(weight, StoredTensor):
        return weight.is_quantised
    return isinstance(weight, PackedWeight)


def describe_packed(weights: Mapping[str, StoredWeight]) -> str:
    """The number of weights in each quantised format, the MTP head's separately; empty without any."""
    parts = []
    for prefix, of_head in (("", False), ("MTP head: ", True)):
        own = [weight for name, weight in weights.items() if name.startswith("mtp.") is of_head]
        counts = Counter(weight.dtype for weight in own if is_packed(weight))
        if counts:
            parts.append(prefix + ", ".join(f"{count} in {dtype}" for dtype, count in counts.items()))
    return "; ".join(parts)
