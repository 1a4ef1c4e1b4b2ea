"""Data of the checkpoint that ships: the standard library's source, its split, tokenizer and token arrays."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BPE_ENTRIES = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
HELD_OUT_ONE_IN = 25
MINIMUM_TRAINING_BYTES = 8_000_000
# Line breaks and runs of blanks are pre-tokens of their own: text may be cut at a line's end, and indentation
# is one token. A word keeps the one space, dot or underscore before it; digits are single.
PRE_TOKENS = r"\r?\n|[ ._]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+|\s"

Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class DataSummary:
    """What the model card says about the data."""

    python_version: str
    train_files: int
    heldout_files: int
    train_bytes: int
    heldout_bytes: int
    skipped_files: int
    file_list_sha256: str


@dataclass(frozen=True)
class Corpus:
    """Token streams (uint16, files separated by <|endoftext|>), the tokenizer and the summary."""

    tokenizer: Tokenizer
    train: Tokens
    heldout: list[Tokens]
    summary: DataSummary


def is_held_out(relative_path: str) -> bool:
    """Return whether a file belongs to the held-out set; only the hash of its relative path decides."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def find_sources(stdlib: Path) -> list[str]:
    """Return the sorted relative paths of all *.py files under `stdlib`, without site-packages."""
    paths = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path.as_posix() for path in paths if not excluded.intersection(path.parts))


def read_split(
    stdlib: Path, minimum_bytes: int = MINIMUM_TRAINING_BYTES
) -> tuple[list[str], list[str], DataSummary]:
    """Return the texts of the training files and of the held-out files, and the summary.

    Files that are not UTF-8 are skipped. Raises ValueError if the training text is under `minimum_bytes`.
    """
    train, heldout, skipped = [], [], 0
    listing = hashlib.sha256()
    train_bytes = heldout_bytes = 0
    for relative in find_sources(stdlib):
        raw = (stdlib / relative).read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            skipped += 1
            continue
        if not text.strip():
            continue
        listing.update(f"{relative} {hashlib.sha256(raw).hexdigest()}\n".encode())
        if is_held_out(relative):
            heldout.append(text)
            heldout_bytes += len(raw)
        else:
            train.append(text)
            train_bytes += len(raw)
    if train_bytes < minimum_bytes:
        raise ValueError(
            f"stdlib must hold at least {minimum_bytes} bytes of training text, "
            f"got {train_bytes} in {stdlib}; name a complete standard library, test/ included, with --stdlib"
        )
    version_file = stdlib / "VERSION"
    version = version_file.read_text().strip() if version_file.exists() else platform.python_version()
    summary = DataSummary(
        version, len(train), len(heldout), train_bytes, heldout_bytes, skipped, listing.hexdigest()
    )
    return train, heldout, summary


def train_tokenizer(texts: list[str], entries: int = BPE_ENTRIES) -> Tokenizer:
    """Return a byte-level BPE of `entries` entries from `texts`, with the special tokens after them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=32,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tokens]:
    return [np.asarray(encoding.ids, dtype=np.uint16) for encoding in tokenizer.encode_batch(texts)]


def prepare(stdlib: Path) -> Corpus:
    """Read the corpus, train its tokenizer and tokenize it; the same files give the same tokens."""
    train_texts, heldout_texts, summary = read_split(stdlib)
    tokenizer = train_tokenizer(train_texts)
    end = np.asarray([tokenizer.token_to_id(END_OF_TEXT)], dtype=np.uint16)
    train = np.concatenate([part for ids in _encode(tokenizer, train_texts) for part in (end, ids)])
    return Corpus(tokenizer, train, _encode(tokenizer, heldout_texts), summary)


def heldout_tokens(stdlib: Path, tokenizer: Tokenizer) -> list[Tokens]:
    """Return the held-out files of `stdlib` as token arrays, only for evaluation."""
    return _encode(tokenizer, read_split(stdlib)[1])


def default_stdlib() -> Path:
    """Return the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def heldout_prefixes(heldout: list[Tokens], count: int, length: int) -> NDArray[np.int64]:
    """Return `count` prefixes of `length` tokens [count, length], spread over the held-out files.

    Files take turns; the n-th prefix of a file, from 0, starts at token n * 2 * length. Raises ValueError if
    the files are too short for so many.
    """
    rows: list[Tokens] = []
    turn = 0
    while len(rows) < count:
        start = turn * 2 * length
        usable = [ids for ids in heldout if len(ids) >= start + length]
        if not usable:
            raise ValueError(
                f"heldout must give {count} prefixes of {length} tokens, got {len(rows)}; ask for fewer"
            )
        rows.extend(ids[start : start + length] for ids in usable)
        turn += 1
    return np.stack(rows[:count]).astype(np.int64)
