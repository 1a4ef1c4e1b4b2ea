"""Compiles the grammar that a request asks for, in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_mtp.frontend.reasoning import find_reasoning
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.sampling import grammar_source
from compiled_mtp.sampling.grammar import GrammarCompiler, Matcher, Reasoning
from compiled_mtp.sampling.grammar_source import GrammarSource
from compiled_mtp.sampling.parameter_checks import only_one_grammar
from compiled_mtp.sampling.sampling_params import SamplingParams
from compiled_mtp.sampling.tool_calls import CALL_FORMS, from_tools


class Guidance:
    """Makes the matchers of one checkpoint's requests; any thread may call it.

    num_ids: width of the logits. If the prompt opens a reasoning part, the grammar begins after it.
    """

    def __init__(
        self, tokenizer: Tokenizer, family: str, num_ids: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._family = family
        self._added = tokenizer.added_ids
        self._reasoning = find_reasoning(tokenizer)
        # A config may name an eos id that the tokenizer lacks.
        known = [token_id for token_id in eos_token_ids if token_id < tokenizer.num_ids]
        self._compiler = GrammarCompiler(tokenizer.json_text, num_ids, known)

    def warm_up(self) -> None:
        """Build the tokenizer's trie, which all grammars share. Raises ValueError without llguidance."""
        self._compiler.warm_up()

    def make_matcher(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> Matcher | None:
        """Return the matcher of a request, None if it asks for no grammar.

        Raises ValueError, with the field's name, for a grammar that does not compile.
        """
        source = self._source(params)
        if source is None:
            return None
        reasoning = None
        if self._reasoning is not None and self._reasoning.is_open(prompt_token_ids):
            reasoning = Reasoning((self._reasoning.end,))
        return self._compiler.compile(source, reasoning)

    def _source(self, params: SamplingParams) -> GrammarSource | None:
        name = only_one_grammar(params.__dict__)
        if name == "response_format":
            return grammar_source.from_response_format(params.response_format)
        if name == "guided_regex":
            return grammar_source.from_regex(params.guided_regex)
        if name == "guided_choice":
            return grammar_source.from_choice(params.guided_choice)
        if name == "guided_grammar":
            return grammar_source.from_lark(params.guided_grammar)
        if name == "tool_choice":
            return from_tools(
                params.tools,
                params.tool_choice,
                CALL_FORMS[self._family],
                self._added,
                parallel_tool_calls=params.parallel_tool_calls,
            )
        return None
