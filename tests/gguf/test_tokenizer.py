"""A tokenizer read from a GGUF file gives the ids of the tokenizer.json from which it was made."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from compiled_mtp.cli.main import main
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.gguf.container import Container, read_container
from compiled_mtp.gguf.tokenizer import is_byte_level, tokenizer_config, tokenizer_json

SPLITS = {"qwen2": QWEN2, "qwen35": QWEN35}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>"]
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5
PAD = "[PAD400]"


def train(split: str) -> tokenizers.Tokenizer:
    """Train a tokenizer of some 400 tokens, made like those of the releases."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=390, initial_alphabet=alphabet, show_progress=False)
    text = "def f(x):\n    return 12345 if x else None\n\n  it's café naïve они हिन्दी 日本語 don't DON'T\r\n"
    made.train_from_iterator([text * 3, "the the then there e\u0301 \u0e33\u0e31"], trainer)
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    return made


def write(path: Path, made: tokenizers.Tokenizer, split: str, changes: Mapping[str, Any] = {}) -> Container:
    """Write the file of a tokenizer, padded by a token that no text encodes to; `changes` to its metadata."""
    inner = json.loads(made.to_str())["model"]
    added = made.get_added_tokens_decoder()
    count = made.get_vocab_size()
    tokens = [made.id_to_token(i) for i in range(count)] + [PAD]
    types = [(CONTROL if added[i].special else USER) if i in added else NORMAL for i in range(count)]
    values: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": split,
        "ggml.tokens": tokens,
        "ggml.token_type": [*types, UNUSED],
        "ggml.merges": [" ".join(pair) for pair in inner["merges"]],
        "ggml.eos_token_id": made.token_to_id("<|im_end|>"),
        "ggml.padding_token_id": made.token_to_id("<|endoftext|>"),
        "ggml.add_bos_token": False,
        "chat_template": "{{ messages[0].content }}",
    }
    writer = gguf.GGUFWriter(path, "qwen35")
    for key, value in (values | changes).items():
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        if value is not None:
            add[type(value)](f"tokenizer.{key}", value)  # type: ignore[operator]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_container(path)


def texts(count: int) -> list[str]:
    """Return random and awkward strings."""
    rng = random.Random(0)
    pieces = [
        *("the", "there", " the", "it's", "DON'T", "'LL", "  ", "   \n", "\r\n", "\n\n", "\t", "12345", "٣٤"),
        *("café", "cafe\u0301", "\u0301", "हिन्दी", "न्", "\u0e33\u0e31", "日本語", "ﬁ", "Å", "\u212b"),
        *("👩‍👩‍👧", "\u200d", "\u00a0", "\u2028", "\ufeff", "\x00", "\x7f", "Ġ", "Ċ", "_", "!!!", "…", "__a"),
        *SPECIAL,
        *PLAIN,
        *("<|im_", "end|>", "<", ">", PAD),
    ]
    found = []
    for _ in range(count):
        parts = (
            rng.choice(pieces) if rng.random() < 0.8 else chr(rng.randrange(0xD800))
            for _ in range(rng.randint(0, 12))
        )
        found.append("".join(parts))
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_equal_ids_on_ten_thousand_strings(split: str, tmp_path: Path) -> None:
    made = train(split)
    container = write(tmp_path / "m.gguf", made, split)
    assert is_byte_level(container)
    text = tokenizer_json(container)
    read = tokenizers.Tokenizer.from_str(text)
    strings = texts(10_000)
    theirs = [one.ids for one in made.encode_batch(strings)]
    assert [one.ids for one in read.encode_batch(strings)] == theirs
    assert len({token for ids in theirs for token in ids}) > 150
    for ids in theirs[:500]:
        assert read.decode(ids, skip_special_tokens=True) == made.decode(ids, skip_special_tokens=True)
    assert read.get_vocab_size() == made.get_vocab_size()
    assert read.token_to_id(PAD) is None
    theirs_added, added = made.get_added_tokens_decoder(), read.get_added_tokens_decoder()
    assert {i: (t.content, t.special) for i, t in added.items()} == {
        i: (t.content, t.special) for i, t in theirs_added.items()
    }


def test_the_two_kinds_of_split_differ(tmp_path: Path) -> None:
    made = train("qwen35")
    right, wrong = (
        tokenizers.Tokenizer.from_str(tokenizer_json(write(tmp_path / f"{s}.gguf", made, s))) for s in SPLITS
    )
    strings = texts(2000)
    ids = [[one.ids for one in t.encode_batch(strings)] for t in (right, wrong)]
    assert ids[0] != ids[1]


def test_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    config = tokenizer_config(write(tmp_path / "m.gguf", train("qwen35"), "qwen35"))
    assert config == {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{{ messages[0].content }}",
    }


def test_a_file_without_chat_template_says_how_to_give_one(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", train("qwen35"), "qwen35", {"chat_template": None})
    with pytest.raises(ValueError, match=r"none in .*m\.gguf; give a Jinja file as chat_template, or a p"):
        Tokenizer(tmp_path / "m.gguf").apply_chat_template([{"role": "user", "content": "a"}])
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    given = Tokenizer(tmp_path / "m.gguf", tmp_path / "own.jinja")
    assert given.apply_chat_template([{"role": "user", "content": "a"}]) == "a!"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"ggml.model": "llama"}, r"tokenizer\.ggml\.model must be gpt2, got llama in .*; put the"),
        ({"ggml.model": None}, r"tokenizer\.ggml\.model must be gpt2, got None"),
        ({"ggml.pre": "gpt-4o"}, r"tokenizer\.ggml\.pre must be qwen2 or qwen35, got gpt-4o"),
        ({"ggml.add_bos_token": True}, r"tokenizer\.ggml\.add_bos_token must be False or None, got True"),
        ({"ggml.pre": [1, 2]}, r"tokenizer\.ggml\.pre must be qwen2 or qwen35, got \[1, 2\]"),
        ({"ggml.tokens": 7}, r"tokenizer\.ggml\.tokens must be a list of texts, got something else"),
        ({"ggml.tokens": None}, r"tokenizer\.ggml\.tokens must be a list of texts, got none"),
        ({"ggml.merges": [1, 2]}, r"tokenizer\.ggml\.merges must be a list of texts, got something else"),
        ({"ggml.token_type": [1, 1]}, r"tokenizer\.ggml\.token_type must have one for each of"),
        ({"ggml.merges": ["zz yy"]}, r"tokenizer\.ggml\.merges must merge tokens .*, got 'zz yy'"),
        ({"ggml.merges": ["alone"]}, r"tokenizer\.ggml\.merges must merge tokens .*, got 'alone'"),
        ({"ggml.eos_token_id": 10**6}, r"tokenizer\.ggml\.eos_token_id must be below \d+, the number"),
    ],
)
def test_tokenizers_that_are_damaged_or_of_another_kind(
    changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    container = write(tmp_path / "m.gguf", train("qwen35"), "qwen35", changes)
    with pytest.raises(ValueError, match=wanted):
        raise_first(container)


def raise_first(container: Container) -> None:
    is_byte_level(container)
    tokenizer_json(container)
    tokenizer_config(container)


def test_ids_are_ranked_by_the_tokenizer_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = train("qwen35")
    write(tmp_path / "model.gguf", made, "qwen35")
    text = tmp_path / "text.txt"
    text.write_text("then the the")
    flags = ["--model", str(tmp_path / "model.gguf"), "--output", str(tmp_path / "ids")]
    assert main(["rank-vocabulary", str(text), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == len(made.encode("then the the").ids)
    assert {int(line) for line in (tmp_path / "ids").read_text().split()} == set(
        made.encode("then the the").ids
    )
