"""Regexes of whole texts for a JSON schema's keywords of strings: pattern, format, length. No torch.

llguidance supports these keywords only for strings inside JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiled_mtp.errors import quote
from compiled_mtp.sampling.grammar_source import Schema

_ANY = "(?s:.*)"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
# Up to 7 groups around "::", which stands for at least one group.
_IPV6 = "|".join(
    [f"(?:{_GROUP}:){{7}}{_GROUP}", f"::(?:(?:{_GROUP}:){{0,6}}{_GROUP})?"]
    + [
        f"(?:{_GROUP}:){{{before - 1}}}{_GROUP}::"
        + (f"(?:(?:{_GROUP}:){{0,{6 - before}}}{_GROUP})?" if before < 7 else "")
        for before in range(1, 8)
    ]
)
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_SHORT_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_PLAIN = r"a-zA-Z0-9\-._~!$&'()*+,;="
_PERCENT = f"%{_HEX}{{2}}"
_SEGMENT = f"(?:[{_PLAIN}:@]|{_PERCENT})"
_HOST = rf"(?:\[(?:{_IPV6}|v{_HEX}+\.[{_PLAIN}:]+)\]|(?:[{_PLAIN}]|{_PERCENT})*)"
_AUTHORITY = f"//(?:(?:[{_PLAIN}:]|{_PERCENT})*@)?{_HOST}(?::[0-9]*)?(?:/{_SEGMENT}*)*"
_PATH = f"/?(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_QUERY = rf"(?:[{_PLAIN}:@/?]|{_PERCENT})*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{_AUTHORITY}|{_PATH})(?:\?{_QUERY})?(?:#{_QUERY})?",
    "unknown": _ANY,
}
"""Regexes of the formats that llguidance supports inside JSON."""


def string_regexes(field: str, schema: Schema) -> list[str]:
    """Return the regexes that a whole string must match, all of them; [] if any text will do.

    Raises ValueError for a format that is not in FORMATS.
    """
    regexes = []
    if "pattern" in schema:
        regexes.append(whole_regex(str(schema["pattern"])))
    if "format" in schema:
        regexes.append(_format_regex(field, schema["format"]))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        regexes.append(f"(?s:.){{{least},{most}}}")
    return regexes


def whole_regex(pattern: str) -> str:
    """Return a regex of the whole texts in which JSON Schema's `pattern` matches somewhere.

    `^` and `$` at the ends of an alternative apply to that alternative alone.
    """
    return "|".join(map(_whole_branch, _split(pattern, "|")))


def _whole_branch(branch: str) -> str:
    is_group = branch.startswith("(") and branch.endswith(")") and len(list(_split(branch, ")"))) == 2
    if is_group and (branch.startswith("(?:") or not branch.startswith("(?")):
        return whole_regex(branch.removeprefix("(?:").removeprefix("(")[:-1])
    inner = branch.lstrip("^")
    before = _ANY if inner == branch else ""
    num_escapes = len(inner[:-1]) - len(inner[:-1].rstrip("\\"))
    is_end = inner.endswith("$") and num_escapes % 2 == 0
    return f"{before}(?:{inner[:-1] if is_end else inner}){'' if is_end else _ANY}"


def _split(pattern: str, separator: str) -> Iterator[str]:
    """Yield the parts of `pattern` between separators outside of classes and groups and without a backslash.

    The closing bracket of an outermost group counts as outside of it.
    """
    begin, depth, class_at, is_escaped = 0, 0, -1, False
    for at, character in enumerate(pattern):
        if is_escaped:
            is_escaped = False
            continue
        is_escaped = character == "\\"
        if class_at >= 0:
            # A bracket at the beginning of a class is one of its characters.
            if character == "]" and pattern[class_at + 1 : at] not in ("", "^"):
                class_at = -1
        elif character == "[":
            class_at = at
        else:
            depth += (character == "(") - (character == ")")
            if character == separator and depth == 0:
                yield pattern[begin:at]
                begin = at + 1
    yield pattern[begin:]


def _format_regex(field: str, name: Any) -> str:
    if name not in FORMATS:
        raise ValueError(
            f"{field}.format must be one of {', '.join(FORMATS)}, got {quote(name)}; "
            "leave it out or write it as a pattern"
        )
    return FORMATS[name]
