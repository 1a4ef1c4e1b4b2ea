"""Rules for the fields of all request bodies: which are read, have no effect, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from compiled_mtp.sampling.parameter_checks import REFUSED
from compiled_mtp.sampling.schema_values import same

UNKNOWN_FIELD = "unknown_field"
UNREAD_FIELD = "unread_field"


# eq=False: typing caches equal annotations, and would merge Unread((1,)) and Unread((True,)).
def unread(rule: str, remedy: str) -> PydanticCustomError:
    """The error of a field with a value that the service does not take: what it must be, and what to do."""
    return PydanticCustomError(UNREAD_FIELD, "must {rule}", {"rule": rule, "remedy": remedy})


@dataclass(frozen=True, eq=False)
class Unread:
    """Marks a field that no handler reads: it may be null or one of `values`, or anything if there are none.

    With `strict_fields` it must be null.
    """

    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {"enum": [*self.values, None]} if self.values else handler(schema)

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return None
        if (info.context or {}).get("strict_fields"):
            raise unread("be left out with strict_fields", "the service does not read it")
        if self.values and not any(same(value, one) for one in self.values):
            rule = f"be {' or '.join(map(json.dumps, self.values))}"
            raise unread(rule, REFUSED.get(info.field_name or "", "leave it out"))
        return None


@dataclass(frozen=True, eq=False)
class Refused:
    """Marks a field of the API that the service does not have: it must be null. `remedy` says what to do."""

    remedy: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {"type": "null"}

    def _check(self, value: Any) -> None:
        if value is not None:
            raise unread("be left out", self.remedy)


# A field that clients send by default, and that has no effect.
Ignored = Annotated[Any, Unread(), Field(default=None, description="accepted, changes nothing")]


class Body(BaseModel):
    """Base of all bodies: exact types, no unknown names, null for a field that is not set."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"additionalProperties": False})

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        # Null is accepted: newer clients send it for unknown fields that they do not use.
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value is not None:
                raise PydanticCustomError(UNKNOWN_FIELD, "unknown field {name}", {"name": name[:100]})
        return self
