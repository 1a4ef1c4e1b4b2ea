"""Checks of sampling parameters, and values derived from them. Pure functions, no torch.

Each check takes a raw value and returns its normal form, or raises ValueError("<name> must <rule>, got
<value>; <remedy>"). Whether the checkpoint has an id is checked elsewhere (frontend/processor.py).
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


def penalty(name: str, value: Any) -> float:
    """Check presence_penalty or frequency_penalty: OpenAI's range, -2 to 2."""
    return _number(name, value, -2, 2, "0 turns it off")


def repetition_penalty(value: Any) -> float:
    """Check repetition_penalty: above 0, at most 2 (transformers' and vLLM's meaning)."""
    number = _number("repetition_penalty", value, 0, 2, "1 turns it off")
    if number == 0:
        _refuse("repetition_penalty", "be above 0", value, "1 turns it off")
    return number


def logit_bias(value: Any) -> dict[int, float]:
    """Return id -> number added to its logit, -100 to 100; ids may be numbers or strings of digits."""
    if value is None:
        return {}
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
        bias[token_id] = _number(f"logit_bias[{token_id}]", number, -100, 100, "-100 all but bans an id")
    return bias


def min_tokens(value: Any, max_tokens: int) -> int:
    """Check min_tokens, the tokens before which no eos id, stop id or stop string ends the output."""
    return _integer("min_tokens", value, 0, max_tokens, "raise max_tokens or lower it")


def allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    """Return the only ids that may be drawn, ascending; None for all."""
    if value is None:
        return None
    ids = _ids("allowed_token_ids", value)
    if not ids:
        _refuse("allowed_token_ids", "hold an id", value, "leave it out to allow all")
    return tuple(sorted(set(ids)))


def stop_token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids that end the output, each once, in the caller's order."""
    ids = tuple(dict.fromkeys(_ids("stop_token_ids", () if value is None else value)))
    if len(ids) > MAX_STOP_IDS:
        _refuse("stop_token_ids", f"hold at most {MAX_STOP_IDS} ids", len(ids), "use stop strings")
    return ids


def bad_words(value: Any) -> tuple[str, ...]:
    """Return the texts whose token sequences are banned, each once; see `bad_word_ids`."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        _refuse("bad_words", "be a list of strings", value, 'give ["..."]')
    for word in value:
        if not isinstance(word, str) or not word.strip():
            _refuse("bad_words", "hold strings with more than spaces", word, "leave it out")
    return tuple(dict.fromkeys(value))


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


def num_choices(value: Any, temperature: float) -> int:
    """Check n: the choices of one request, 1 to 16."""
    number = _integer("n", value, 1, MAX_CHOICES, "send more requests")
    if number > 1 and temperature < 1e-5:
        _refuse("n", "be 1 at temperature 0", value, "all choices would be equal; raise temperature")
    return number


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


def logprobs(name: str, value: Any) -> int | None:
    """Check logprobs or prompt_logprobs: how many of the likeliest ids to list, 0 to 20; None is off."""
    if value is None:
        return None
    return _integer(name, value, 0, MAX_LOGPROBS, "0 lists the token alone")


def logprobs_mode(value: Any) -> LogprobsMode:
    """Check logprobs_mode: raw, of the model's logits, processed, after masks, temperature and filters, or
    both."""
    if value not in ("raw", "processed", "both"):
        _refuse("logprobs_mode", "be raw, processed or both", value, "raw is the model's own distribution")
    mode: LogprobsMode = value
    return mode


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


def _ids(name: str, value: Any) -> list[int]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        _refuse(name, "be a list of token ids", value, "give [...]")
    return [_id(name, one) for one in value]


def _id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        _refuse(name, "hold token ids from 0", value, "give numbers that the tokenizer gives")
    return value


def _integer(name: str, value: Any, least: int, most: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(name, f"be an integer from {least} to {most}", value, remedy)
    return value


def _number(name: str, value: Any, least: float, most: float, remedy: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        _refuse(name, f"be a number from {least} to {most}", value, remedy)
    return float(value)


def _refuse(name: str, rule: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"{name} must {rule}, got {_short(value)}; {remedy}")


def _short(value: Any) -> str:
    # Bounded, and printable in every log and response.
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large integer"
    text = ascii(value if not isinstance(value, (str, bytes)) else value[:80])
    return text if len(text) <= 80 else f"{text[:77]}..."
