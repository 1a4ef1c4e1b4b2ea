"""The programs of a step, one per shape: which one a launch runs, and in which order they are made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.graphs.buckets import (
    NO_DRAFTS,
    PREFILL_MULTIPLE,
    Bucket,
    RoundShape,
    lay_out,
    pick,
    pick_prefill_length,
    prefill_lengths,
    prompt_chunk_limit,
    sharing,
)
from compiled_mtp.graphs.compile import GraphMode, Program, without_collector
from compiled_mtp.ops.compile_ahead import compiling_ahead
from compiled_mtp.ops.row_logprobs import RowLogprobs
from compiled_mtp.plan import SPARE_SLOTS, PromptChunk
from compiled_mtp.rounds.catch_up import catch_up
from compiled_mtp.rounds.first_token import conclude_first, first_filtered, first_logits, first_token
from compiled_mtp.rounds.logprobs import add_logprobs
from compiled_mtp.rounds.prefill import prefill
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS, score_rows
from compiled_mtp.rounds.two_phase import TwoPhaseRound
from compiled_mtp.runner.image_inputs import ImageInputs
from compiled_mtp.runner.program_maker import ProgramMaker, Shape
from compiled_mtp.runner.static_inputs import StaticInputs
from compiled_mtp.step import Step
from compiled_mtp.vision.encoder import Encoder

logger = logging.getLogger(__name__)


class Programs:
    """Runs decode rounds, two-phase rounds, prompt chunks, first tokens and catch-ups in fixed shapes.

    graph_mode: how code becomes CUDA graphs, None for no graphs. `warm_up` prepares every shape's program;
    nothing compiles afterwards. Programs that are neither compiled nor captured need no warm-up, and their
    prompts end without padding. With graphs, prompts, first tokens, wide rounds and rounds of plain_depths
    are captured uncompiled. A round that draws tokens runs in one of `buckets`, and one whose tokens are all
    given, always in two phases, in one of given_buckets. All buckets of a depth with two requests or more
    share a program, except with a communicator, which needs the number of rows. encoder: holds the features
    of prompts' images, None for a step without images. The phases of two-phase rounds are not compiled; with
    graphs each is captured after its first run, so the start takes no longer.
    """

    def __init__(
        self,
        step: Step,
        buckets: Sequence[Bucket],
        prefill_chunk: int,
        *,
        is_compiled: bool,
        graph_mode: GraphMode | None,
        plain_depths: Collection[int] = (),
        communicator: Communicator | None = None,
        encoder: Encoder | None = None,
        given_buckets: Sequence[Bucket] = (),
    ) -> None:
        self.step = step
        self.drawn_buckets, self.given_buckets = tuple(buckets), tuple(given_buckets)
        # A wide round without a chain has the shape of some rounds of given tokens.
        self.buckets = tuple(dict.fromkeys((*self.drawn_buckets, *self.given_buckets)))
        # A captured length takes no time to compile.
        self.lengths = prefill_lengths(prefill_chunk, has_middles=graph_mode is not None)
        self.is_compiled = is_compiled
        self.graph_mode = graph_mode
        self.has_shapes = is_compiled or graph_mode is not None
        self.maker = ProgramMaker(
            step,
            is_compiled=is_compiled,
            graph_mode=graph_mode,
            plain_depths=plain_depths,
            communicator=communicator,
        )
        self.device = step.slots.pos.device
        self.max_batch = step.slots.pos.shape[0] - SPARE_SLOTS
        self.most_prompt_chunks = prompt_chunk_limit(self.lengths[-1], self.max_batch)
        sizes = {bucket.groups for bucket in self.drawn_buckets}
        self._sharing = sharing(sizes if communicator is None else ())
        sizes |= {bucket.groups for bucket in self.given_buckets}
        self.inputs = StaticInputs(self.device, sizes, self.lengths, self.most_prompt_chunks)
        like = step.slots.last_hidden
        self.images = (
            None
            if encoder is None
            else ImageInputs(encoder, self.lengths, like.shape[1], like.dtype, self.device)
        )
        self.two_phase = TwoPhaseRound(step)
        # Slots and shape of the round whose first phase has run and whose second phase has not.
        self._verified: tuple[tuple[int, ...], RoundShape] | None = None
        self._make_tables()

    def _make_tables(self) -> None:
        """Enter each shape's uncompiled code, which `warm_up` replaces by the shape's program."""
        step = self.step

        def plain(program: Callable[..., Any]) -> Program:
            # A captured graph records no gradients; eager code needs no_grad.
            return torch.no_grad()(program)

        self._decode: dict[Bucket, Program] = dict.fromkeys(self.drawn_buckets, plain(step.decode))
        two_phase = self.two_phase
        verify, accept, commit = map(plain, (two_phase.verify, two_phase.accept, two_phase.commit))
        self._phases: dict[tuple[str, Bucket], Program] = {
            **{("verify", bucket): verify for bucket in self.buckets},
            **{("accept", bucket): accept for bucket in self.drawn_buckets},
            **{("commit", bucket): commit for bucket in self.given_buckets},
        }
        # Phases whose graph is not captured yet.
        self._uncaptured = set() if self.graph_mode is None else {*self._phases}
        self._prefill: dict[int, Program] = dict.fromkeys(self.lengths, plain(MethodType(prefill, step)))
        # By the length of the chain and the largest number of prompts, 1 or most_prompt_chunks.
        self._first_token: dict[tuple[int, int], Program] = dict.fromkeys(
            sorted({(b.shape.chain, n) for b in self.drawn_buckets for n in (1, self.most_prompt_chunks)}),
            plain(MethodType(first_token, step)),
        )
        # A catch-up has the shape of the deepest round.
        deepest = RoundShape(step.mtp_step, step.mtp_step)
        defers = step.mtp_step > 0 and any(b.shape == NO_DRAFTS for b in self.drawn_buckets)
        widest = {b.groups: b for b in self.drawn_buckets if defers and b.shape == deepest}
        self._catch_up: dict[int, Program] = dict.fromkeys(widest, plain(MethodType(catch_up, step)))

    @property
    def count(self) -> int:
        """Number of shapes that `warm_up` prepares when it is given no depth."""
        rounds = len(self._decode) + len(self._catch_up)
        return rounds + len(self._prefill) + len(self._first_token)

    def decode(self, slots: tuple[int, ...], shape: RoundShape) -> torch.Tensor:
        """One decode round of the requests in `slots`; returns what `Step.decode` does, padding rows last."""
        # A whole round after a first phase means that the requests of that phase have ended: no second phase
        # follows.
        self._verified = None
        bucket = pick(self.buckets, len(slots), shape)
        state_index = self.inputs.write_batch(bucket.groups, slots)
        return self._decode[bucket](state_index, bucket.shape)

    def catch_up(self, slots: tuple[int, ...]) -> None:
        """Let the draft model read the inputs of `slots` that rounds without drafts deferred."""
        bucket = pick(self.buckets, len(slots), RoundShape(self.step.mtp_step, self.step.mtp_step))
        self._catch_up[bucket.groups](self.inputs.write_batch(bucket.groups, slots))

    def verify(self, slots: tuple[int, ...], shape: RoundShape) -> None:
        """Run the first phase of a round. Before `accept` any launch except another `verify` may run."""
        # A first phase that fails midway leaves buffers that no second phase may read.
        self._verified = None
        bucket = pick(self.buckets, len(slots), shape)
        if self.two_phase.num_rows < bucket.rows:
            self.two_phase.reserve(max(bucket.rows for bucket in self.buckets))
        self._call_phase("verify", bucket, self.inputs.write_batch(bucket.groups, slots))
        self._verified = (slots, shape)

    @torch.no_grad()
    def accept(
        self,
        slots: tuple[int, ...],
        shape: RoundShape,
        masks: torch.Tensor | None = None,
        *,
        with_logprobs: bool = False,
        with_processed: bool = False,
        is_given: bool = False,
    ) -> torch.Tensor:
        """Run the second phase of the round of the last `verify`; return what `Step.decode` does.

        masks: the masks of the slots' rows, on the device, as `sample` takes them. with_logprobs: append log
        probabilities to the output, see `add_logprobs`; with_processed: some request asks for the log
        probabilities of its processed logits. is_given: the whole output of every request is given, so
        nothing is drafted. Raises ValueError unless the verify had the same slots and shape.
        """
        if self._verified != (slots, shape):
            raise ValueError(
                f"accept must follow the verify of its own round, got slots {slots} and {shape} after "
                f"{self._verified}; plan both phases of a round alike"
            )
        self._verified = None
        bucket, two_phase = pick(self.buckets, len(slots), shape), self.two_phase
        state_index = self.inputs.write_batch(bucket.groups, slots)
        two_phase.write_masks(masks)
        # Before the slots' histories gain the new tokens.
        filtered = two_phase.filtered(state_index, shape) if with_logprobs and with_processed else None
        packed = self._call_phase("commit" if is_given else "accept", bucket, state_index)
        if not with_logprobs:
            return packed
        return add_logprobs(self.step, packed, two_phase.logits[: bucket.rows], filtered)

    @torch.no_grad()
    def first(
        self,
        slot: int,
        chain: int,
        masks: torch.Tensor | None = None,
        *,
        with_logprobs: bool = False,
        with_processed: bool = False,
        is_given: bool = False,
    ) -> torch.Tensor:
        """Run `first_token` for one slot whose prompt is processed, with masks [1, words], log probabilities
        or a given output as in `accept`.

        Runs uncompiled: each request has one first token.
        """
        self._check_chain(chain)
        step, state_index = self.step, self.inputs.write_ended(1, (slot,))
        logits, positions = first_logits(step, state_index)
        has_filtered = with_logprobs and with_processed
        filtered = first_filtered(step, state_index, logits, positions, masks) if has_filtered else None
        packed = conclude_first(step, state_index, logits, positions, chain, masks, is_given=is_given)
        return add_logprobs(step, packed, logits, filtered) if with_logprobs else packed

    def prefill(self, slots: Sequence[int], prompt_chunks: Sequence[PromptChunk]) -> RowLogprobs | None:
        """Process one prompt chunk for each of `slots`.

        A chunk with next_ids, the ids that follow its tokens, must be alone: returns their log probabilities,
        then undefined rows up to a multiple of SLICE_ROWS. Raises ValueError for more rows or chunks than a
        launch holds.
        """
        first_rows, end = lay_out([len(prompt_chunk.token_ids) for prompt_chunk in prompt_chunks])
        length = pick_prefill_length(self.lengths, end, len(prompt_chunks), self.max_batch)
        if self.has_shapes:
            rows, count = length, prompt_chunk_limit(length, self.max_batch)
        else:
            # No padding after the last chunk, except to the fewest rows of a launch on a GPU.
            least = PREFILL_MULTIPLE if self.device.type == "cuda" else 0
            rows, count = max(end, least), len(prompt_chunks)
        tokens = self.inputs.write_tokens(length, rows, prompt_chunks, first_rows)
        table = self.inputs.write_prompt_chunks(count, slots, prompt_chunks, first_rows, end)
        images = () if self.images is None else self.images.write(rows, slots, prompt_chunks, first_rows)
        hidden = self._prefill[length](tokens, table, *images)
        next_ids = prompt_chunks[0].next_ids
        if not next_ids:
            return None
        assert len(prompt_chunks) == 1
        chosen = self.inputs.zeros(-(-len(next_ids) // SLICE_ROWS) * SLICE_ROWS, torch.int64)
        self.inputs.upload(chosen[: len(next_ids)], next_ids)
        return score_rows(self.step.target, hidden, chosen, self.step.num_valid_ids)

    def first_token(self, slots: Sequence[int], chain: int) -> torch.Tensor:
        """Draw first tokens for `slots`, whose last prompt chunks are processed; return what
        `rounds.first_token` does, padding rows last.

        Raises ValueError for a chain that no program was made for.
        """
        self._check_chain(chain)
        kind = 1 if len(slots) == 1 else self.most_prompt_chunks
        ended = self.inputs.write_ended(kind if self.has_shapes else len(slots), slots)
        return self._first_token[chain, kind](ended, chain)

    def drop(self) -> None:
        """Free every program and its CUDA graph; nothing can be launched afterwards."""
        for programs in (self._decode, self._phases, self._prefill, self._first_token, self._catch_up):
            programs.clear()

    def forget_batches(self) -> None:
        """Upload every batch again and forget the first phase of a round, after an interrupted launch."""
        self.inputs.forget_batches()
        self._verified = None

    @property
    def is_between_rounds(self) -> bool:
        """Whether no round is between its two phases, whose buffers must then not be written."""
        return self._verified is None

    @torch.no_grad()
    def warm_up(
        self,
        progress: Callable[[int, int], None] | None = None,
        saved: Path | None = None,
        *,
        depth: int | None = None,
        save_to: Path | None = None,
    ) -> None:
        """Prepare every shape's program, on padding rows alone: compile it, and with graphs capture it.

        With `depth`, prepare only the shapes of prompts and of that depth's rounds; rounds of another depth
        may run once `adopt` was called for each of their shapes. save_to: a directory to create, to which
        every compiled program is written. saved: such a directory, from which programs are loaded instead of
        compiled. With "reduce-overhead" nothing is written, because CUDA-graph trees live in the process that
        recorded them; a start then relies on the compiler's own caches. Mutates nothing that a request reads.
        Calls progress(done, count) after each shape. Raises ValueError if the saved programs were made for
        tensors of another layout.
        """
        assert self.has_shapes
        indices = self.inputs.state_indices
        with nullcontext() if saved is None else without_collector():
            self.maker.mark_static(
                inputs=[index for size, index in indices.items() if size not in self._sharing],
                shared=[indices[size] for size in self._sharing],
            )
            self.inputs.write_padding()
            shapes = list(self.shapes(depth))
            if self.graph_mode is not None or self.device.type == "cuda":
                self._compile_kernels([s for s in shapes if saved is None or self.maker.is_plain(s)])
            self.maker.make_all(shapes, progress, saved, save_to)
            self.step.slots.clear_padding_row()

    @torch.no_grad()
    def adopt(self, shape: Shape, program: Program) -> None:
        """Prepare a loaded program, on padding rows alone, while requests are decoded in other shapes."""
        # This overwrites the inputs.
        self.inputs.forget_batches()
        for tensor in shape.inputs:
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        self.maker.make_ready(shape, program)
        self.step.slots.clear_padding_row()

    @torch.no_grad()
    def launch_apart(self) -> None:
        """Launch, on padding rows alone, the kernels of masks, log probabilities and rounds of given tokens,
        which no program runs.

        They then compile when the engine starts instead of in the first request's round. Each depth has its
        own kernels for all batch sizes, so its smallest bucket suffices. Of the forward only rounds of given
        tokens need others.
        """
        step, two_phase = self.step, self.two_phase
        kept_rows = two_phase.num_rows
        smallest = {b.shape: b for b in sorted(self.buckets, reverse=True)}
        two_phase.reserve(max(bucket.rows for bucket in smallest.values()))
        for bucket in smallest.values():
            state_index = self.inputs.state_indices[bucket.groups]
            phases = [two_phase.accept] if bucket in self.drawn_buckets else []
            if bucket in self.given_buckets:
                two_phase.verify(state_index, bucket.shape)
                phases.append(two_phase.commit)
            filtered = two_phase.filtered(state_index, bucket.shape)
            for phase in phases:
                packed = phase(state_index, bucket.shape)
                add_logprobs(step, packed, two_phase.logits[: bucket.rows], filtered)
        masks = two_phase.masks[:1].clone()
        two_phase.reserve(kept_rows)
        for chain in dict.fromkeys(chain for chain, _ in self._first_token):
            for own_masks in (None, masks):
                self.first(0, chain, own_masks, with_logprobs=True, with_processed=True)
        hidden = step.slots.last_hidden[:1]
        score_rows(step.target, hidden, self.inputs.zeros(SLICE_ROWS, torch.int64), step.num_valid_ids)

    def shapes(self, depth: int | None = None) -> Iterator[Shape]:
        """All shapes, or those that prompts and rounds of one depth need, largest first.

        The CUDA graphs' pool then does not grow again. Prompts come before rounds: they have more rows.
        """
        return (shape for shape in self._every_shape() if depth is None or shape.depth in (depth, None))

    def shapes_of(self, depths: Sequence[int]) -> Iterator[Shape]:
        """The shapes that only rounds of these depths need, one depth after another."""
        return (shape for depth in depths for shape in self.shapes(depth) if shape.depth == depth)

    def _every_shape(self) -> Iterator[Shape]:
        inputs = self.inputs
        for length in reversed(self.lengths):
            chunk = (
                inputs.token_ids[length],
                inputs.prompt_chunks[prompt_chunk_limit(length, self.max_batch)],
                *(() if self.images is None else self.images.of(length)),
            )
            yield Shape(None, f"prefill_{length}", prefill, chunk, self._prefill, length)
        for bucket in sorted(self.drawn_buckets, reverse=True):
            (verify, chain), groups = bucket.shape, bucket.groups
            name = f"decode_{self._of_batch(f'{verify}_to_{chain}_drafts', groups)}"
            is_wide, round_inputs = verify > chain, (inputs.state_indices[groups], bucket.shape)
            # Captured uncompiled, as first tokens are.
            depth = None if is_wide and self.graph_mode is not None else chain
            yield Shape(depth, name, Step.decode, round_inputs, self._decode, bucket, is_wide)
        for groups in sorted(self._catch_up, reverse=True):
            name, batch = self._of_batch("catch_up", groups), (inputs.state_indices[groups],)
            yield Shape(0, name, catch_up, batch, self._catch_up, groups)
        for chain, count in self._first_token:
            name = f"{'first_token' if count == 1 else 'first_tokens'}_{chain}_drafts"
            # With graphs they are captured uncompiled, which takes no time: every start prepares them.
            of_depth, ended = chain if self.graph_mode is None else None, (inputs.ended[count], chain)
            yield Shape(of_depth, name, first_token, ended, self._first_token, (chain, count))

    def _of_batch(self, name: str, size: int) -> str:
        """The name of the program for batches of that size, or of the one that several sizes share."""
        return name if size in self._sharing else f"{name}_of_{size}"

    def _compile_kernels(self, shapes: Sequence[Shape]) -> None:
        """Compile the kernels of these shapes, and those that no program runs, without launching them.

        Operators also make the tensors that they keep for good (counters of K splits), which must not be in a
        graph's pool. A capture frees the memory that these calls left cached, so a prompt's memory is taken
        once.
        """
        largest = max(self.drawn_buckets)
        with compiling_ahead() if self.device.type == "cuda" else nullcontext():
            self.step.decode(self.inputs.state_indices[largest.groups], largest.shape)
            self.launch_apart()
            for shape in shapes:
                shape.function(self.step, *shape.inputs)

    def _check_chain(self, chain: int) -> None:
        if (chain, 1) not in self._first_token:
            known = sorted({known for known, _ in self._first_token})
            raise ValueError(f"chain must be one of {known}, got {chain}; name it when the programs are made")

    def _call_phase(self, name: str, bucket: Bucket, state_index: torch.Tensor) -> Any:
        """Run one phase; capture it after its first run, when its operators' kernels and counters exist."""
        key, inputs = (name, bucket), (state_index, bucket.shape)
        output = self._phases[key](*inputs)
        if key in self._uncaptured:
            self._uncaptured.remove(key)
            try:
                self._phases[key] = self.maker.capture(self._phases[key], inputs)
            except RuntimeError as error:  # For example no memory for its pool: requests go on without it.
                logger.warning("the %s phase of %s runs without a graph: %s", name, bucket, error)
        return output
