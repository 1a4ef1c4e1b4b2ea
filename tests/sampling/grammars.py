"""Shared by the tests of grammars, with llguidance itself, token by token, as the reference."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.sampling.grammar import GrammarCompiler, MaskFiller, Matcher, Window
from compiled_mtp.sampling.grammar_source import GrammarSource

MODEL = Path(__file__).parents[2] / "compiled_mtp" / "default_model"
TOKENIZER_JSON = (MODEL / "tokenizer.json").read_text(encoding="utf-8")
NUM_IDS = 4160
END_OF_TEXT, IM_START, IM_END = 4096, 4097, 4098
EOS = (END_OF_TEXT, IM_END)
THINK, END_THINK = 4099, 4100
WORDS = (NUM_IDS + 31) // 32
TOKENIZER = Tokenizer(MODEL)
FORBIDS_NOTHING = [True] * NUM_IDS


def write_thinking_tokenizer(directory: Path) -> None:
    """Write the default checkpoint's tokenizer with added tokens around a reasoning part."""
    shutil.copy(MODEL / "tokenizer_config.json", directory)
    tokenizer = json.loads(TOKENIZER_JSON)
    added = tokenizer["added_tokens"]
    for token_id, content in ((THINK, "<think>"), (END_THINK, "</think>")):
        added.append({**added[0], "id": token_id, "content": content, "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def compiler(**limits: int) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER_JSON, NUM_IDS, EOS, **limits)


class OneByOne:
    """The reference: a new llguidance matcher that takes a prefix token by token."""

    def __init__(self, source: GrammarSource, step_max_items: int = 50_000) -> None:
        tokenizer = LLTokenizer(TOKENIZER_JSON, n_vocab=NUM_IDS, eos_token=list(EOS))
        limits = LLParserLimits(max_grammar_size=50_000, step_max_items=step_max_items)
        self._start = LLMatcher(tokenizer, source.lark(), log_level=0, limits=limits)
        assert not self._start.is_error(), self._start.get_error()

    def after(self, prefix: Sequence[int]) -> LLMatcher | None:
        """Return a matcher after `prefix`, None if the grammar forbids the prefix or ends before its end."""
        matcher = self._start.deep_copy()
        for token_id in prefix:
            if matcher.is_stopped() or not matcher.consume_token(token_id):
                return None
        return matcher

    def mask(self, prefix: Sequence[int]) -> list[bool]:
        """Return which ids may follow; all if the grammar forbids the prefix or ends before its end."""
        matcher = self.after(prefix)
        if matcher is None:
            return FORBIDS_NOTHING
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        assert not matcher.is_error(), matcher.get_error()
        return unpack(words)


def unpack(words: torch.Tensor) -> list[bool]:
    """Return mask words as one bool per id."""
    result: list[bool] = _bits(words).tolist()
    return result


def _bits(words: torch.Tensor) -> torch.Tensor:
    return ((words[:, None] >> torch.arange(32)) & 1).flatten()[:NUM_IDS].bool()


def draw_from(words: torch.Tensor, key: object) -> int:
    """Return an allowed id, a function of the mask and of `key` alone."""
    return random.Random(repr(key)).choice(_bits(words).nonzero().flatten().tolist())


def masks(rows: int) -> torch.Tensor:
    """Return a poisoned buffer for masks."""
    return torch.full((rows, WORDS), 0x5A5A5A5A, dtype=torch.int32)


def draw(mask: Sequence[bool], key: object) -> int:
    """Return an allowed id, a function of the mask and of `key` alone."""
    allowed = [token_id for token_id, is_allowed in enumerate(mask) if is_allowed]
    assert allowed
    return random.Random(repr(key)).choice(allowed)


def decode(matcher: Matcher, filler: MaskFiller, key: object, step: int = 0, limit: int = 600) -> list[int]:
    """Decode to the end of the grammar as the engine does, with all kinds of drafts; return the tokens."""
    tokens: list[int] = []
    rng = random.Random(repr((key, step)))
    while not matcher.is_ended and matcher.error is None and len(tokens) < limit:
        drafts = propose(matcher, (key, len(tokens)), rng, rng.randint(min(step, 1), step))
        buffer = masks(len(drafts) + 1)
        filler.fill([Window(matcher, 0, drafts)], buffer)
        if matcher.error is not None:
            break
        emitted: list[int] = []
        for row in range(len(drafts) + 1):
            emitted.append(draw_from(buffer[row], (key, len(tokens) + row)))
            if row == len(drafts) or drafts[row] != emitted[-1]:
                break
        tokens += emitted[: matcher.accept(emitted)]
    return tokens[:limit]


def propose(matcher: Matcher, key: Any, rng: random.Random, length: int) -> list[int]:
    """Return drafts: allowed ones up to a random position, then random ids, which are likely forbidden."""
    base, position = key
    # The copy shares the request's lexer, which may reach its limit here.
    copy, drafts = matcher._live.deep_copy(), []
    right = rng.randint(0, length)
    while len(drafts) < right and not copy.is_stopped():
        words = torch.frombuffer(bytearray(copy.compute_bitmask()), dtype=torch.int32)
        if copy.is_error():
            break
        drafts.append(draw_from(words, (base, position + len(drafts))))
        copy.consume_token(drafts[-1])
    return drafts + [rng.randrange(NUM_IDS) for _ in range(length - len(drafts))]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a bounded JSON schema: nested, enums, numbers, unions, recursion."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += ["object", "object", "array", "tuple", "anyOf", "list of types", "recursion"]
    kind = rng.choice(kinds) if depth else rng.choice(["object", "object", "array", "anyOf", "recursion"])

    def inner() -> dict[str, Any]:
        return random_schema(rng, depth + 1)

    if kind == "string":
        least = rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}
    if kind == "integer":
        least = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}
    if kind == "number":
        # Without a step a number may have any number of digits.
        return {"type": "number", "minimum": -9.5, "maximum": rng.choice([0, 12.25, 99]), "multipleOf": 0.25}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 'q"uote', 3, -1.5, True, None, ["a", 1], {"k": "v"}], 4)}
    if kind == "const":
        return {"const": rng.choice(["fixed", 42, [1, 2], {"a": None}])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{2,5}$", "^v[0-9]{1,3}\\.[0-9]{1,2}$", "^(ab|cd){1,3}$"]),
        }
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + rng.randint(0, 3)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(rng.randint(2, 3))]}
    if kind == "list of types":
        return {"type": ["boolean", "null"]}
    if kind == "recursion" and depth == 0:
        node = {
            "type": "object",
            "properties": {"value": inner(), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}
    names = rng.sample(["id", "name", "größe", "with space", "a-b", "tags", "x"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: inner() for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def most_bytes(schema: Mapping[str, Any], nodes: int) -> int:
    """Return an upper bound of the bytes of a `random_schema`'s JSON text with at most `nodes` recursions.

    A token has at least one byte, so it bounds the tokens too.
    """
    if "$defs" in schema:
        value = schema["$defs"]["node"]["properties"]["value"]
        return nodes * (most_bytes(value, nodes) + len('{"value": , "next": }')) + len("null")
    if "anyOf" in schema:
        return max(most_bytes(one, nodes) for one in schema["anyOf"])
    if (fixed := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return max(len(json.dumps(one).encode()) for one in fixed)
    kind = schema["type"]
    if kind == "object":
        items = schema["properties"].items()
        return 2 + sum(len(json.dumps(name).encode()) + 4 + most_bytes(one, nodes) for name, one in items)
    if kind == "array" and "prefixItems" in schema:
        return 2 + sum(2 + most_bytes(one, nodes) for one in schema["prefixItems"])
    if kind == "array":
        return 2 + schema["maxItems"] * int(2 + most_bytes(schema["items"], nodes))
    if kind == "string" and "maxLength" in schema:
        # A character may be written as \uXXXX.
        return 2 + 6 * int(schema["maxLength"])
    # Other schemas are single values: a boolean, a number, a pattern or a format; a uuid is the longest.
    return len('"00000000-0000-0000-0000-000000000000"')


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens, without special tokens; it must be UTF-8."""
    return b"".join(TOKENIZER.token_bytes(token_id) for token_id in tokens).decode()
