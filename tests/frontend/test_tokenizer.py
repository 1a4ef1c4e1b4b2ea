"""Ids and text: equal to those of Hugging Face's packages, no partial characters, errors by name."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from compiled_mtp.frontend.tokenizer import Detokenizer, Tokenizer

TEMPLATE = """{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("Unexpected role: " + message.role) }}
    {%- endif %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content | trim + eos_token + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is false %}
        {{- "<think>\\n\\n</think>\\n\\n" }}
    {%- endif %}
{%- endif %}"""


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE with few merges, special tokens and added tokens that are not special."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    made.train_from_iterator(["def main(): return the the then", "größer über 日本語 日本"], trainer)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "a tool é")])
    made.enable_truncation(3)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def test_numbers(folder: Path, tokenizer: Tokenizer) -> None:
    think = len(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(False))
    assert tokenizer.num_ids == think + 2
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("<|im_start|><think><|im_end|>") == [1, think, 2]


@given(st.text(max_size=60))
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    if not tokenizer.special_ids & set(ids):
        assert tokenizer.decode(ids) == text


@given(st.lists(st.integers(0, 310), max_size=40))
def test_pieces_of_any_ids_join_to_what_the_tokenizers_package_decodes(
    folder: Path, tokenizer: Tokenizer, ids: list[int]
) -> None:
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == reference.decode(ids, skip_special_tokens=True)


@given(st.text("aé日😀", max_size=20), st.data())
def test_no_piece_ends_in_half_a_character(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    # One id per byte: every character of several bytes is cut.
    of_byte = {
        tokenizer.token_bytes(i): i for i in range(tokenizer.num_ids) if len(tokenizer.token_bytes(i)) == 1
    }
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for count, byte in enumerate(text.encode(), start=1):
        piece = detokenizer.add(of_byte[bytes([byte])])
        assert "\ufffd" not in piece
        shown += piece
        # The detokenizer holds back only the bytes of one incomplete character.
        assert shown == text.encode()[:count].decode(errors="ignore")
    assert shown == text
    assert detokenizer.flush() == ""


def test_half_a_character_at_the_end_is_flushed_once(tokenizer: Tokenizer) -> None:
    of_byte = {tokenizer.token_bytes(i): i for i in range(300)}
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(of_byte[b"\xc3"]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.add(of_byte[b"\xa9"]) == "\ufffd"


def test_a_long_prompt_is_not_cut_by_a_saved_truncation(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("xyz " * 50)) > 100


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match="prompt must be Unicode text, got half a surrogate pair at character 2"
    ):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    "variables",
    [{}, {"enable_thinking": False}, {"tools": [{"name": "größe", "parameters": {"a": "<b>"}}]}],
)
def test_chats_render_as_transformers_renders_them(
    tokenizer: Tokenizer, oracle: Any, variables: dict[str, Any]
) -> None:
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Größe? <b>&"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "und?"},
    ]
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    assert tokenizer.apply_chat_template(messages, **variables) == expected
    assert expected.endswith("</think>\n\n" if "enable_thinking" in variables else "assistant\n")


def test_marks_of_generated_text_render_as_transformers_renders_them(
    folder: Path, tmp_path: Path, oracle: Any
) -> None:
    """Training libraries save templates in which `{% generation %}` marks the assistant's words."""
    template = """{%- set seen = 'none' -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' -}}
        {% generation %}
        {%- set seen = message.content -%}
        {{- seen ~ loop.index ~ '<|im_end|>' }}
        {% endgeneration %}
    {%- else -%}
        {{- message.content ~ seen }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{% generation %}{{ seen }}{% endgeneration %} {% endif -%}"""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    expected = oracle.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    tokenizer = Tokenizer(copy(folder, tmp_path, chat_template__jinja=template))
    assert tokenizer.apply_chat_template(messages) == expected
    assert "b2<|im_end|>" in expected


def test_text_parts_are_joined_and_other_media_are_refused_by_name(tokenizer: Tokenizer) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    parts.append({"type": "video", "video": "a"})
    with pytest.raises(
        ValueError, match=r"messages\[0\].content\[2\] must be of type text or image, got 'video'; send"
    ):
        tokenizer.apply_chat_template([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages must hold a message, got none"),
        (["hi"], r"messages\[0\] must be an object with a role, got 'hi'"),
        ([{"content": "hi"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be text, got 5"),
        (
            [{"role": "wizard", "content": "x"}],
            "chat template, got: Unexpected role: wizard; change the messages",
        ),
    ],
)
def test_what_is_no_chat_is_refused_by_name(tokenizer: Tokenizer, messages: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template(messages)


def copy(folder: Path, to: Path, **files: str | None) -> Path:
    contents = {file.name: file.read_text() for file in folder.iterdir()}
    for name, content in (contents | {name.replace("__", "."): text for name, text in files.items()}).items():
        if content is not None:
            (to / name).write_text(content)
    return to


def test_a_template_in_the_config_serves_and_none_is_an_error_only_for_chats(
    folder: Path, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "x"}]
    without = Tokenizer(copy(folder, tmp_path, chat_template__jinja=None))
    assert without.encode("x")
    with pytest.raises(
        ValueError,
        match=r"messages must have a chat template, got none in .*; give a Jinja file as chat_template",
    ):
        without.apply_chat_template(chat)
    for template in ("T{{ messages[0].content }}", [{"name": "default", "template": "Tx"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert Tokenizer(tmp_path).apply_chat_template(chat) == "Tx"


def test_a_given_template_replaces_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "own.jinja"
    given.write_text("{{ messages[0].content | tojson }}")
    tokenizer = Tokenizer(folder, given)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == '"a"'
    given.write_text("{% if")
    for file in (given, tmp_path / "none.jinja"):
        with pytest.raises(ValueError, match=f"^chat_template must be a Jinja file, got {file}: "):
            Tokenizer(folder, file)


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path, tmp_path: Path) -> None:
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = Tokenizer(copy(folder, tmp_path, chat_template__jinja=evil))
    with pytest.raises(ValueError, match="chat template, got: access to attribute '__class__'"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template, got",
    [
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ 'x'.index('y') }}", "substring not found"),
        ("{{ messages[0].content.encode('ascii') }}", "'ascii' codec can't encode"),
        ("{{ missing.attribute.of_it }}", "'missing' is undefined"),
    ],
)
def test_whatever_a_template_raises_is_named(folder: Path, tmp_path: Path, template: str, got: str) -> None:
    tokenizer = Tokenizer(copy(folder, tmp_path, chat_template__jinja=template))
    with pytest.raises(
        ValueError,
        match=f"^messages must satisfy the checkpoint's chat template, got: {got}.*; change the messages$",
    ):
        tokenizer.apply_chat_template([{"role": "user", "content": "ü"}])


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"tokenizer__json": None},
            "model must hold a tokenizer.json, got .*; download the whole checkpoint",
        ),
        ({"tokenizer__json": "{"}, "tokenizer.json must be a tokenizer, got an error"),
        ({"tokenizer__json": "[]"}, "tokenizer.json must be a tokenizer, got an error"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json must be JSON, got an error"),
        ({"tokenizer_config__json": "[]"}, "tokenizer_config.json must hold a JSON object, got list"),
        (
            {"tokenizer_config__json": '{"eos_token": {"id": 2}}'},
            "eos_token must be a string or an object with content, got {'id': 2}; download tokenizer_config",
        ),
    ],
)
def test_bad_files_are_refused_by_name(
    folder: Path, tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer(copy(folder, tmp_path, **files))


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template__jinja": "{% if %}"},
        {"chat_template__jinja": None, "tokenizer_config__json": '{"chat_template": 5}'},
    ],
)
def test_a_broken_template_stops_chats_alone(
    folder: Path, tmp_path: Path, files: dict[str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    # A service started by an earlier test of this process may have set another level.
    caplog.set_level(logging.WARNING, "compiled_mtp")
    tokenizer = Tokenizer(copy(folder, tmp_path, **files))
    assert tokenizer.decode(tokenizer.encode("plain")) == "plain"
    message = "chat template of .* must be Jinja, got: .*; download the file again"
    with pytest.raises(ValueError, match=f"^{message}$"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    (record,) = caplog.records
    assert re.match(f"chats are refused: {message}", record.getMessage())


def test_another_decoder_is_refused(folder: Path, tmp_path: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text()) | {"decoder": {"type": "Fuse"}}
    with pytest.raises(ValueError, match="must decode byte-level tokens, got 'Fuse'"):
        Tokenizer(copy(folder, tmp_path, tokenizer__json=json.dumps(saved)))
