"""Whether a prompt ends inside a reasoning part, for grammars and for the service's parser."""

from __future__ import annotations

import pytest

from compiled_mtp.frontend.guidance import Guidance
from compiled_mtp.frontend.reasoning import ReasoningTokens, find_reasoning
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.request import SamplingParams
from compiled_mtp.sampling.grammar import MaskFiller, Window
from tests.sampling.grammars import EOS, MODEL, NUM_IDS, masks, unpack, write_thinking_tokenizer

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    # Prompt -> whether its reasoning part is open.
    CHAT.format("What does <think> mean?"): False,
    CHAT.format("</think> <think>") + "<think>\n\n</think>\n\n": False,
    CHAT.format("hi") + "<think>\n": True,
    CHAT.format("no </think> here") + "<think>": True,
    CHAT.format("hi") + "<think>\nSo far, <think> so good": True,
    CHAT.format("hi") + "<think>\nwell\n</think>\n\nThe <think> tag": False,
    CHAT.format("hi") + "The <think> tag": False,
    "<|im_start|>assistant\n<think>\n<|im_end|>\n" + CHAT.format("go on"): False,
    "<|im_start|>user\n<think> about it": False,
    "Explain the tag <think> in a word:": False,
    "<think> at the beginning, and more": False,
    "A plain prompt\n<think>": True,
    "A plain prompt\n<think> \n\n": True,
    "A plain prompt\n<think><|endoftext|>": False,
    "<think></think>": False,
    "": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("thinking")
    write_thinking_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def reasoning(tokenizer: Tokenizer) -> ReasoningTokens:
    found = find_reasoning(tokenizer)
    assert found is not None
    return found


@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_is_only_mentioned_opens_nothing(
    tokenizer: Tokenizer, reasoning: ReasoningTokens, prompt: str
) -> None:
    assert reasoning.is_open(tokenizer.encode(prompt)) is PROMPTS[prompt]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_grammar_holds_from_the_first_token_unless_reasoning_is_open(
    tokenizer: Tokenizer, prompt: str
) -> None:
    guidance = Guidance(tokenizer, "qwen3_5", NUM_IDS, frozenset(EOS))
    matcher = guidance.make_matcher(SamplingParams(guided_choice=["yes"]), tokenizer.encode(prompt))
    assert matcher is not None
    buffer = masks(1)
    MaskFiller(num_threads=1).fill([Window(matcher, 0, [])], buffer)
    allowed = unpack(buffer[0])
    assert allowed[tokenizer.encode("q")[0]] is PROMPTS[prompt]
    assert allowed[tokenizer.encode("y")[0]]


def test_a_tokenizer_without_the_tokens_has_no_reasoning() -> None:
    assert find_reasoning(Tokenizer(MODEL)) is None


def test_many_ids_are_looked_through_quickly(reasoning: ReasoningTokens, tokenizer: Tokenizer) -> None:
    assert reasoning.is_open([7] * 300_000 + tokenizer.encode("<think>"))
    assert not reasoning.is_open([7] * 300_000)
