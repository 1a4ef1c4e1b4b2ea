"""Writes a byte-level tokenizer of any size, for benchmarks of shapes without a checkpoint.

The vocabulary has the 256 bytes and distinct texts like those of large vocabularies: words with and without a
leading space, words in other scripts, numbers, runs of punctuation and of spaces. It has no merges: a text is
encoded as its bytes, but a model may emit every token.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import pre_tokenizers

EOS = "<|im_end|>"
# The letters of words in several scripts, and the characters of runs of marks.
_SCRIPTS = ("etaoinshrdlucm", "оеаинтсрвлкмдп", "αεηιοτνσρκ", "的一是不了人我在有他这中大来上国")
_MARKS = "()[]{}<>.,:;=+-*/_\"'#!?|& \n\t0123456789"


def write_tokenizer(directory: Path, num_ids: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with `num_ids` tokens, the last of them EOS.

    Raises ValueError for fewer than 257 tokens, the bytes and EOS.
    """
    if num_ids < 257:
        raise ValueError(f"num_ids must be at least 257, got {num_ids}; the bytes and the end are tokens")
    rng = random.Random(0)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizer.alphabet()))}
    while len(vocab) < num_ids - 1:
        ((token, _),) = pre_tokenizer.pre_tokenize_str(_random_text(rng))
        vocab.setdefault(token, len(vocab))
    added = {"id": num_ids - 1, "content": EOS, "special": True, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}), encoding="utf-8")


def _random_text(rng: random.Random) -> str:
    """Return a random word or run of marks, at least two bytes long."""
    if rng.random() < 0.1:
        return "".join(rng.choices(_MARKS, k=rng.randint(2, 6)))
    word = "".join(rng.choices(rng.choice(_SCRIPTS), k=rng.randint(2, 9)))
    return rng.choice(("", " ")) + (word.capitalize() if rng.random() < 0.2 else word)
