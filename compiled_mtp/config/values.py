"""Types of settings, with the forms that flags and the environment give them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_settings import NoDecode

from compiled_mtp.errors import check, fail, shown

MOST_DRAFTS = 7


def split_at_commas(value: Any) -> Any:
    """Split at commas 'a,b', from the environment, or each of ['a,b', 'c'], from a repeated flag."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(
            p for entry in value for p in (split_at_commas(entry) if isinstance(entry, str) else (entry,))
        )
    return value


def _depth_or_auto(value: Any) -> Any:
    if value == "auto":
        return value
    try:
        return _DEPTH.validate_python(value)
    except ValidationError:
        raise fail("mtp_step", f"be auto or 0 to {MOST_DRAFTS}", shown(value, repr), "choose one") from None


def _device(value: str) -> str:
    is_one = re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None
    check(is_one, "device", "be auto, cpu, cuda or cuda:N", value, "choose one; cuda:0 is the first GPU")
    return value


def _count_or_file(value: Any) -> Any:
    if value is None or isinstance(value, Path):
        return value
    if isinstance(value, str) and not value.lstrip("+-").isdigit():
        return Path(value)
    try:
        return _COUNT.validate_python(value)
    except ValidationError:
        rule, remedy = "be a number of ids, at least 1, or a file of ids", "leave it out for all ids"
        raise fail("draft_vocab", rule, shown(value, repr), remedy) from None


Depth = Annotated[int, Field(ge=0, le=MOST_DRAFTS)]
DepthOrAuto = Annotated[int | Literal["auto"], PlainValidator(_depth_or_auto)]
Depths = Annotated[tuple[Depth, ...], NoDecode, BeforeValidator(split_at_commas)]
Device = Annotated[str, AfterValidator(_device)]
CountOrFile = Annotated[int | Path | None, BeforeValidator(_count_or_file)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_at_commas)]
Numbers = Annotated[tuple[int, ...] | None, NoDecode, BeforeValidator(split_at_commas)]
_DEPTH: TypeAdapter[int] = TypeAdapter(Depth)
_COUNT: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=1)])
