"""Converts a GGUF file's tokenizer to Hugging Face's tokenizer.json and tokenizer_config.json. No torch.

Source: llama.cpp's converter of byte-level BPE tokenizers, and the way llama.cpp splits text before merges.
Text is normalised to NFC, as the checkpoints do: the file does not name a normalisation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from compiled_mtp.errors import check, fail, shown
from compiled_mtp.gguf.container import Container

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[LETTER]+|\p{N}"
    r"| ?[^\sLETTER\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The regular expressions that split text, by tokenizer.ggml.pre. Qwen3.5 counts marks as letters.
_SPLITS = {
    "qwen2": _SPLIT.replace("LETTER", r"\p{L}"),
    "qwen35": _SPLIT.replace("LETTER", r"\p{L}\p{M}"),
}
# Values of tokenizer.ggml.token_type.
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
_CONVERT_AGAIN = "convert the model again"


def is_byte_level(container: Container) -> bool:
    """Whether the file's tokenizer is of a kind that `tokenizer_json` can write."""
    metadata = container.metadata
    is_bpe = metadata.get("tokenizer.ggml.model") == "gpt2"
    return is_bpe and metadata.get("tokenizer.ggml.pre") in tuple(_SPLITS)


def tokenizer_json(container: Container) -> str:
    """The text of the file's tokenizer.json.

    Raises ValueError, naming the key, for a tokenizer of another kind and for tokens and merges that do not
    fit together.
    """
    path, metadata = container.path, container.metadata
    remedy = "put the tokenizer.json of the checkpoint beside the file"
    for key, wanted in (("model", ("gpt2",)), ("pre", tuple(_SPLITS)), ("add_bos_token", (False, None))):
        name = f"tokenizer.ggml.{key}"
        rule = f"be {' or '.join(map(str, wanted))}"
        got = metadata.get(name)
        check(got in wanted, name, rule, f"{shown(got)} in {path}", remedy)
    tokens, merges = (_texts(container, f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    is_one_each = isinstance(types, list) and len(types) == len(tokens)
    rule = f"have one for each of {len(tokens)} tokens"
    check(is_one_each, "tokenizer.ggml.token_type", rule, f"another number in {path}", _CONVERT_AGAIN)
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] not in (_CONTROL, _USER, _UNUSED)}
    pairs = [merge.split(" ", 1) for merge in merges]
    lacking = [pair for pair in pairs if len(pair) != 2 or not _is_made(pair, vocabulary)]
    if lacking:
        got = f"{shown(' '.join(lacking[0]), repr)} in {path}"
        raise fail("tokenizer.ggml.merges", "merge tokens into tokens", got, _CONVERT_AGAIN)
    added = [_added(i, tokens[i], kind) for i, kind in enumerate(types) if kind in (_CONTROL, _USER)]
    split = {"type": "Split", "pattern": {"Regex": _SPLITS[metadata["tokenizer.ggml.pre"]]}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"behavior": "Isolated", "invert": False}, byte_level],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model | {"vocab": vocabulary, "merges": pairs},
    }
    return json.dumps(parts, ensure_ascii=False)


def tokenizer_config(container: Container) -> dict[str, Any]:
    """The file's chat template and special tokens, with the keys of tokenizer_config.json."""
    metadata = container.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    config: dict[str, Any] = {}
    for name, key in (("eos", "eos"), ("pad", "padding"), ("bos", "bos"), ("unk", "unknown")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            continue
        is_token = type(number) is int and 0 <= number < len(tokens)
        rule = f"be below {len(tokens)}, the number of tokens"
        got = f"{shown(number)} in {container.path}"
        check(is_token, f"tokenizer.ggml.{key}_token_id", rule, got, _CONVERT_AGAIN)
        config[f"{name}_token"] = tokens[number]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def _texts(container: Container, key: str) -> Sequence[str]:
    texts = container.metadata.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        got = "none" if texts is None else "something else"
        raise fail(key, "be a list of texts", f"{got} in {container.path}", _CONVERT_AGAIN)
    return texts


def _is_made(pair: Sequence[str], vocabulary: dict[str, int]) -> bool:
    return pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) in vocabulary


def _added(number: int, text: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, **flags, "special": kind == _CONTROL}
