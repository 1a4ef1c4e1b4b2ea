"""Checks of sampling parameters, and values derived from them. Pure functions, no torch.

Each check raises ValueError("<name> must <rule>, got <value>; <remedy>"). Whether the checkpoint has an id is
checked elsewhere (frontend/processor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_IDS = 16
MAX_BIASED_IDS = 1024

LogprobsMode = Literal["raw", "processed", "both"]

_NO_BUDGET = "set max_tokens, or turn thinking off (chat_template_kwargs, enable_thinking)"

REFUSED: dict[str, str] = {
    "echo": "put the prompt before the text yourself; prompt_logprobs gives its log probabilities",
    "suffix": "write the fill-in-the-middle prompt with the model's own tokens",
    "best_of": "use n and logprobs, and choose by the sum",
    "no_repeat_ngram_size": "use repetition_penalty, frequency_penalty or bad_words",
    "typical_p": "use top_p or min_p",
    "thinking_budget": _NO_BUDGET,
    "thinking_token_budget": _NO_BUDGET,
    "max_thinking_tokens": _NO_BUDGET,
    "truncate_prompt_tokens": "cut the prompt yourself, where its structure is known",
}
"""Parameters of other engines that this one refuses, each with its remedy."""


def check_names(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError for the first field whose name is in REFUSED or unknown, whatever its value is."""
    for name in fields:
        if name in REFUSED:
            raise ValueError(f"{name} must be left out, got {_short(fields[name])}; {REFUSED[name]}")
        if name not in known:
            raise ValueError(
                f"{ascii(name)[1:-1][:64]} must be a sampling parameter, got an unknown name; known are "
                f"{', '.join(known)}"
            )


def logit_bias(value: Any) -> dict[int, float]:
    """Return id -> number added to its logit, -100 to 100; ids may be numbers or strings of digits."""
    if not isinstance(value, Mapping):
        _refuse("logit_bias", "be an object of id: bias", value, "give {} for none")
    if len(value) > MAX_BIASED_IDS:
        _refuse("logit_bias", f"hold at most {MAX_BIASED_IDS} ids", len(value), "use allowed_token_ids")
    bias: dict[int, float] = {}
    for key, number in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id = int(key) if is_digits else _id("logit_bias", key)
        if token_id in bias:
            _refuse("logit_bias", "name an id once", key, "drop one of them")
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not -100 <= number <= 100:
            name, rule = f"logit_bias[{token_id}]", "be a number from -100 to 100"
            _refuse(name, rule, number, "-100 all but bans an id")
        bias[token_id] = float(number)
    return bias


def allowed_token_ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the only ids that may be drawn, ascending; None for all."""
    if value is None:
        return None
    if not value:
        _refuse("allowed_token_ids", "hold an id", value, "leave it out to allow all")
    return tuple(sorted({_id("allowed_token_ids", one) for one in value}))


def check_stop_ids(value: Sequence[int]) -> None:
    """Raise ValueError for more than 64 stop_token_ids, and for one that no checkpoint has."""
    count = len({_id("stop_token_ids", one) for one in value})
    if count > MAX_STOP_IDS:
        _refuse("stop_token_ids", f"hold at most {MAX_STOP_IDS} ids", count, "use stop strings")


def check_bad_words(value: Sequence[str]) -> None:
    """Raise ValueError for a blank text among bad_words; see `bad_word_ids`."""
    for word in value:
        if not word.strip():
            _refuse("bad_words", "hold strings with more than spaces", word, "leave it out")


def bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the id sequences that bad_words forbid: each word encoded alone and after a space.

    Does not ban the same letters inside other tokens: " TypeError" may be one token. Raises ValueError for
    more than 64 sequences and for a sequence of more than 16 tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stripped = word.lstrip()
        for text in (stripped, f" {stripped}"):
            ids = tuple(encode(text))
            if not 1 <= len(ids) <= MAX_BAD_WORD_IDS:
                _refuse("bad_words", f"be at most {MAX_BAD_WORD_IDS} tokens each", word, "give a part of it")
            found[ids] = None
    if len(found) > MAX_BAD_WORDS:
        _refuse("bad_words", f"make at most {MAX_BAD_WORDS} sequences", len(found), "a word makes up to two")
    return tuple(found)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`: `seed` itself for choice 0, else 64 signed bits.

    They are splitmix64's finalizer of seed + index * 0x9E3779B97F4A7C15 (Steele, Lea, Flood, OOPSLA 2014).
    """
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    word = (seed + index * 0x9E3779B97F4A7C15) & mask
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    word ^= word >> 31
    return word - (1 << 64) if word >> 63 else word


def only_one_grammar(fields: Mapping[str, Any]) -> str | None:
    """Return the name of the field that asks for a grammar, or None. Raises ValueError for two fields."""
    response_format = fields.get("response_format")
    is_text = isinstance(response_format, Mapping) and response_format.get("type") == "text"
    asked = {
        "response_format": response_format is not None and not is_text,
        "guided_regex": fields.get("guided_regex") is not None,
        "guided_choice": fields.get("guided_choice") is not None,
        "guided_grammar": fields.get("guided_grammar") is not None,
        "tool_choice": fields.get("tool_choice") not in (None, "none", "auto"),
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    if len(names) > 1:
        raise ValueError(
            f"{names[1]} must be left out with {names[0]}, got both; an output can have only one grammar"
        )
    return names[0] if names else None


def _id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        _refuse(name, "hold token ids from 0", value, "give numbers that the tokenizer gives")
    return value


def _refuse(name: str, rule: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"{name} must {rule}, got {_short(value)}; {remedy}")


def _short(value: Any) -> str:
    # Bounded, and printable in every log and response.
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large integer"
    text = ascii(value if not isinstance(value, (str, bytes)) else value[:80])
    return text if len(text) <= 80 else f"{text[:77]}..."
