"""The shapes a step runs in: static inputs for each, compiled ahead or run as they are."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.communicators.communicator import Exchange
from compiled_mtp.graphs.buckets import (
    NO_DRAFTS,
    PIECE_MULTIPLE,
    PREFILL_MULTIPLE,
    Bucket,
    RoundShape,
    lay_out,
    pick,
    pick_prefill_length,
    piece_limit,
    prefill_lengths,
    sharing,
)
from compiled_mtp.graphs.compile import (
    GraphMode,
    Inputs,
    Program,
    capture,
    compile_program,
    compiler_settings,
    load_program,
    mark_sizes,
    mark_static,
    save_program,
    without_collector,
)
from compiled_mtp.ops.row_logprobs import RowLogprobs
from compiled_mtp.ops.sample import filter_logits
from compiled_mtp.plan import SPARE_SLOTS, Piece
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS, score_rows
from compiled_mtp.step import Step

logger = logging.getLogger(__name__)

# The first call compiles, the second records a CUDA graph, the third replays it.
_WARM_UP_CALLS = 3
_LAYOUT_NAME = "layout.json"
# Where there are graphs these are captured of the code as it is: their time is that of our own operators, and
# to compile the default chunk's six lengths takes a minute and more.
_PLAIN_METHODS = (Step.prefill, Step.first_token)


@dataclass(frozen=True)
class Shape:
    """A method of Step, the static inputs it is made for, and where the program is kept.

    name: of the program, which shapes that differ in the batch size alone may have in common. depth: of the
    rounds that need it, None for what is made ready whatever they are.
    """

    depth: int | None
    name: str
    method: Callable[..., torch.Tensor | None]
    inputs: Inputs
    programs: dict[Any, Program]
    key: Hashable


class Programs:
    """Runs decode rounds, their halves, pieces of prompts and what the draft catches up with in fixed shapes.

    graph_mode says how code becomes CUDA graphs, None that it does not. `warm_up` makes every shape ready,
    and nothing compiles afterwards; what is neither compiled nor captured needs none, and its prompts are not
    padded behind the last. Where compiled code becomes graphs, prompts, first tokens and rounds of
    plain_depths are captured as they are. A round runs in one of `buckets`; those of a depth from two
    requests on have their program in common, unless there is an exchange between ranks: it asks for the
    number of rows, so each size has a program. Where there are graphs, the code of a half round is
    captured as it is behind its first run, which costs the start nothing. Inputs are copied to the device
    only when they change.
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
        exchange: Exchange | None = None,
    ) -> None:
        self.step = step
        self.buckets = tuple(buckets)
        self.lengths = prefill_lengths(prefill_chunk)
        self.is_compiled = is_compiled
        self.graph_mode = graph_mode
        self.has_shapes = is_compiled or graph_mode is not None
        self.plain_depths = plain_depths
        self._exchange = exchange
        self._save_to: Path | None = None
        # What was made for a shape and is for others too, while they are made ready.
        self._made: dict[str, Program] = {}
        self.device = step.slots.pos.device
        self._batches: dict[int, tuple[int, ...]] = {}
        # Of the CUDA graphs; the seconds that it took to capture them by hand.
        self._pool: Any = None
        self.capture_s = 0.0
        sizes = {bucket.groups for bucket in self.buckets}
        self._state_indices = {size: self._zeros(size, torch.int32) for size in sizes}
        self._sharing = sharing(sizes if exchange is None else ())
        self._prefill_inputs = {n: self._zeros(n, torch.int64) for n in self.lengths}
        self.max_batch = step.slots.pos.shape[0] - SPARE_SLOTS
        self.most_pieces = piece_limit(self.lengths[-1], self.max_batch)
        # By their number, what `Step.prefill` and `Step.first_token` are told of prompts.
        counts = range(1, self.most_pieces + 1)
        self._pieces = {n: self._zeros(5 * n, torch.int64).view(5, n) for n in counts}
        self._ended = {n: self._zeros(n, torch.int32) for n in counts}
        # A captured graph records no gradients anyhow: only what runs as code has to be told.
        without_gradients = torch.no_grad()
        self._decode: dict[Bucket, Program] = dict.fromkeys(self.buckets, without_gradients(step.decode))
        halves = {"verify": step.verify_half, "accept": step.accept_half}
        self._halves: dict[tuple[str, Bucket], Program] = {
            (name, bucket): without_gradients(half)
            for name, half in halves.items()
            for bucket in self.buckets
        }
        self._prefill: dict[int, Program] = dict.fromkeys(self.lengths, without_gradients(step.prefill))
        # By the length of the chain and the number of prompts, one or the most.
        self._first_token: dict[tuple[int, int], Program] = dict.fromkeys(
            sorted({(b.shape.chain, n) for b in self.buckets for n in (1, self.most_pieces)}),
            without_gradients(step.first_token),
        )
        # Halves whose graph is still to come.
        self._uncaptured = set() if graph_mode is None else {*self._halves}
        # What rounds without drafts keep has the shape of the deepest round.
        deepest = RoundShape(step.mtp_step, step.mtp_step)
        widest = {b.groups: b for b in self.buckets if b.shape == deepest}
        has_kept = step.mtp_step > 0 and any(b.shape == NO_DRAFTS for b in self.buckets)
        self._catch_up: dict[int, Program] = dict.fromkeys(
            widest if has_kept else (), without_gradients(step.catch_up)
        )
        # The slots and shape of the round whose forward the buffers between the halves hold.
        self._verified: tuple[tuple[int, ...], RoundShape] | None = None
        # Rows of step.masks that may forbid ids: those behind them allow all.
        self._masked_rows = 0

    @property
    def count(self) -> int:
        """Number of shapes that `warm_up` makes ready unless it is told a depth."""
        rounds = len(self._decode) + len(self._catch_up)
        return rounds + len(self._prefill) + len(self._first_token)

    def decode(self, slots: tuple[int, ...], shape: RoundShape) -> torch.Tensor:
        """One decode round of the requests in `slots`; returns what `Step.decode` does, padding rows last."""
        # Nobody accepts a half that lies before a whole round: its requests have ended.
        self._verified = None
        bucket = pick(self.buckets, len(slots), shape)
        state_index = self._upload_slots(bucket, slots)
        return self._decode[bucket](state_index, bucket.shape)

    def catch_up(self, slots: tuple[int, ...]) -> None:
        """Let the draft read what rounds of `slots` without drafts have kept."""
        bucket = pick(self.buckets, len(slots), RoundShape(self.step.mtp_step, self.step.mtp_step))
        self._catch_up[bucket.groups](self._upload_slots(bucket, slots))

    def verify(self, slots: tuple[int, ...], shape: RoundShape) -> None:
        """The first half of a round. Other launches may follow before `accept`, but for another `verify`."""
        # Fails it half way, nobody accepts what the buffers then hold.
        self._verified = None
        bucket = pick(self.buckets, len(slots), shape)
        if self.step.verified_logits.shape[0] < bucket.rows:
            self.step.reserve_halves(max(bucket.rows for bucket in self.buckets))
        state_index = self._upload_slots(bucket, slots)
        self._call_half("verify", bucket, state_index)
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
    ) -> torch.Tensor:
        """The second half of the round of the last `verify`; returns what `Step.decode` does, with_logprobs
        with `pack_logprobs`; with_processed says that some request wants those of its processed logits.

        masks: those of the slots' rows, on the device, as `sample` takes them. Raises ValueError unless the
        verify was of the same slots and shape.
        """
        if self._verified != (slots, shape):
            raise ValueError(
                f"accept must follow the verify of its own round, got slots {slots} and {shape} after "
                f"{self._verified}; plan both halves of a round alike"
            )
        self._verified = None
        bucket, step = pick(self.buckets, len(slots), shape), self.step
        state_index = self._upload_slots(bucket, slots)
        self._write_masks(masks)
        # What the tokens are drawn from; the slots' own state has moved on once they are.
        filtered = step.filter_half(state_index, shape) if with_logprobs and with_processed else None
        packed = self._call_half("accept", bucket, state_index)
        if not with_logprobs:
            return packed
        return step.logprobs(packed, state_index, step.verified_logits[: bucket.rows], filtered)

    @torch.no_grad()
    def first(
        self,
        slot: int,
        chain: int,
        masks: torch.Tensor | None = None,
        *,
        with_logprobs: bool = False,
        with_processed: bool = False,
    ) -> torch.Tensor:
        """`first_token` of a slot whose prompt is processed, with masks [1, words] or log probabilities as
        `accept` has them.

        Runs as it is, uncompiled: a request has one first token.
        """
        step, state_index = self.step, self._ended[1]
        self._check_chain(chain)
        self._upload(state_index, (slot,))
        logits, sampling = step.first_logits(state_index)
        has_filtered = with_logprobs and with_processed
        filtered = filter_logits(logits, *sampling, None, masks) if has_filtered else None
        packed = step.conclude_first(state_index, logits, sampling, chain, masks)
        return step.logprobs(packed, state_index, logits, filtered) if with_logprobs else packed

    def prefill(self, slots: Sequence[int], pieces: Sequence[Piece]) -> RowLogprobs | None:
        """The next pieces of the prompts in `slots`; of one that goes alone and has next_ids, the ids behind
        its tokens, their log probabilities, and rows without a meaning behind them up to a multiple of
        SLICE_ROWS. Raises ValueError for more rows or pieces than a launch has.
        """
        first_rows, end = lay_out([len(piece.token_ids) for piece in pieces])
        length = pick_prefill_length(self.lengths, end, len(pieces), self.max_batch)
        buffer = self._prefill_inputs[length]
        # A launch of a fixed shape has padding that Step.prefill masks. Another one ends, but on a GPU not
        # before 64 rows, and its padding lies between pieces alone.
        least = PREFILL_MULTIPLE if self.device.type == "cuda" else 0
        tokens = buffer if self.has_shapes else buffer[: max(end, least)]
        token_ids: list[int] = []
        for first_row, piece in zip(first_rows, pieces, strict=True):
            token_ids += [0] * (first_row - len(token_ids))
            token_ids += piece.token_ids
        self._upload(buffer[:end], token_ids)
        num_pieces = piece_limit(length, self.max_batch) if self.has_shapes else len(pieces)
        missing = num_pieces - len(pieces)
        columns = [
            (s, p.start, len(p.token_ids), r, p.mark)
            for s, p, r in zip(slots, pieces, first_rows, strict=True)
        ]
        columns += [(0, 0, 0, end, 0)] * missing
        table = self._pieces[num_pieces]
        self._upload(table.view(-1), [value for row in zip(*columns, strict=True) for value in row])
        hidden = self._prefill[length](tokens, table)
        next_ids = pieces[0].next_ids
        if not next_ids:
            return None
        assert len(pieces) == 1
        chosen = self._zeros(-(-len(next_ids) // SLICE_ROWS) * SLICE_ROWS, torch.int64)
        self._upload(chosen[: len(next_ids)], next_ids)
        return score_rows(self.step.target, hidden, chosen, self.step.num_valid_ids)

    def first_token(self, slots: Sequence[int], chain: int) -> torch.Tensor:
        """What follows the last pieces of the prompts in `slots`; returns what Step.first_token does, padding
        rows last.

        Raises ValueError for a depth that no program was made for.
        """
        self._check_chain(chain)
        kind = 1 if len(slots) == 1 else self.most_pieces
        size = kind if self.has_shapes else len(slots)
        self._upload(self._ended[size], (*slots, *[0] * (size - len(slots))))
        return self._first_token[chain, kind](self._ended[size], chain)

    def drop(self) -> None:
        """Give back every program, and with them the CUDA graphs: nothing runs any more."""
        for programs in (self._decode, self._halves, self._prefill, self._first_token):
            programs.clear()
        self._catch_up.clear()

    def forget_batches(self) -> None:
        """Upload every batch again: an upload may have been interrupted. No round is half done."""
        self._batches.clear()
        self._verified = None

    @torch.no_grad()
    def warm_up(
        self,
        progress: Callable[[int, int], None] | None = None,
        saved: Path | None = None,
        *,
        depth: int | None = None,
        save_to: Path | None = None,
    ) -> None:
        """Make every shape ready, on padding rows alone: compile it, and with graphs capture it.

        With `depth` only those of prompts and of its rounds: no other round may be asked for before `adopt`
        has been given each of its shapes. Every compiled program is written to save_to, a directory that is
        made; with `saved`, such a directory, nothing is compiled: programs are loaded. CUDA-graph trees live
        in the process that recorded them: with "reduce-overhead" nothing is written, and what the compiler
        cached has to do. Mutates nothing that a request reads. Calls progress(done, count) after each shape.
        Raises ValueError if the saved programs were made for tensors of another layout.
        """
        assert self.has_shapes
        if save_to is not None and self.graph_mode != "reduce-overhead":
            save_to.mkdir(parents=True)
            self._save_to = save_to
        with nullcontext() if saved is None else without_collector():
            self._prepare_all(progress, saved, list(self.shapes(depth)))

    @torch.no_grad()
    def launch_apart(self) -> None:
        """Launch, on padding rows alone, what masks and log probabilities launch beside the programs.

        So their kernels are compiled when the engine starts, and not in the round of the first request that
        asks for them. They are one for each depth, whatever the batch: the smallest bucket does. A forward
        has no kernel of its own there.
        """
        step, kept_rows = self.step, self.step.verified_logits.shape[0]
        smallest = {b.shape: b for b in sorted(self.buckets, reverse=True)}
        step.reserve_halves(max(bucket.rows for bucket in smallest.values()))
        for bucket in smallest.values():
            state_index = self._state_indices[bucket.groups]
            filtered = step.filter_half(state_index, bucket.shape)
            packed = step.accept_half(state_index, bucket.shape)
            step.logprobs(packed, state_index, step.verified_logits[: bucket.rows], filtered)
        masks = step.masks[:1].clone()
        step.reserve_halves(kept_rows)
        for chain in dict.fromkeys(chain for chain, _ in self._first_token):
            for own_masks in (None, masks):
                self.first(0, chain, own_masks, with_logprobs=True, with_processed=True)
        hidden = step.slots.last_hidden[:1]
        score_rows(step.target, hidden, self._zeros(SLICE_ROWS, torch.int64), step.num_valid_ids)

    def _prepare_all(
        self, progress: Callable[[int, int], None] | None, saved: Path | None, shapes: Sequence[Shape]
    ) -> None:
        if self.device.type == "cuda":
            self.launch_apart()  # It makes buffers anew, so it comes first.
        self._mark_static()
        if saved is not None:
            self.check_layout(saved)
        if self.device.type == "cuda":
            # What operators keep for ever (counters of split sums) must not lie in a CUDA graph's pool.
            self._pool = torch.cuda.graph_pool_handle()
            largest = max(self.buckets)
            state_index = self._state_indices[largest.groups]
            self.step.decode(state_index, largest.shape)
            self.step.first_token(self._ended[1], largest.shape.chain)
        for table in self._pieces.values():
            table[2, 0] = 1
            table[3, 1:] = PIECE_MULTIPLE
        # All before the first capture, which gives back what they took: a prompt's memory is held once.
        for shape in filter(self._is_plain, shapes):
            shape.programs[shape.key](*shape.inputs)
        with compiler_settings():
            for done, shape in enumerate(shapes):
                if self._is_plain(shape):
                    shape.programs[shape.key] = self._capture(shape.programs[shape.key], shape.inputs)
                else:
                    if shape.name not in self._made:
                        self._made[shape.name] = self._make_program(shape, saved)
                    self._make_ready(shape, self._made[shape.name])
                if progress is not None:
                    progress(done + 1, len(shapes))
        self._made.clear()
        self.step.slots.clear_padding_row()

    def _make_program(self, shape: Shape, saved: Path | None) -> Program:
        if self._save_to is not None:
            # What was traced once is what both processes run.
            self.save_shape(shape, self._save_to)
            saved = self._save_to
        if saved is not None:
            program = load_program(saved / shape.name, self.step)
            return program if self._exchange is None else self._exchange.calls(program)
        return compile_program(partial(shape.method, self.step), shape.name, self.graph_mode)

    @property
    def is_between_rounds(self) -> bool:
        """Whether no round is half done: what is between the halves must not be written."""
        return self._verified is None

    @torch.no_grad()
    def adopt(self, shape: Shape, program: Program) -> None:
        """Make a loaded program ready, on padding rows alone, while requests are decoded in other shapes."""
        # What was uploaded last is not what they hold from here on.
        self._batches.clear()
        for tensor in shape.inputs:
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        self._make_ready(shape, program)
        self.step.slots.clear_padding_row()

    def save_shape(self, shape: Shape, directory: Path) -> None:
        """Write one program to `directory`, and the layout that all have been compiled for."""
        self._mark_static()
        layout = directory / _LAYOUT_NAME
        if not layout.exists():
            layout.write_text(json.dumps(self._layout()))
        with nullcontext() if self._exchange is None else self._exchange.left_open():
            save_program(shape.method, self.step, shape.inputs, directory / shape.name)

    def shapes(self, depth: int | None = None) -> Iterator[Shape]:
        """All shapes, or those that rounds of one depth and prompts need: the largest first, so that the pool
        of the CUDA graphs need not grow again, and prompts have more rows than rounds."""
        return (shape for shape in self._every_shape() if depth is None or shape.depth in (depth, None))

    def shapes_of(self, depths: Sequence[int]) -> Iterator[Shape]:
        """Those that rounds of these depths need and prompts do not, a depth after the other."""
        return (shape for depth in depths for shape in self.shapes(depth) if shape.depth == depth)

    def _every_shape(self) -> Iterator[Shape]:
        for length in reversed(self.lengths):
            chunk = (self._prefill_inputs[length], self._pieces[piece_limit(length, self.max_batch)])
            yield Shape(None, f"prefill_{length}", Step.prefill, chunk, self._prefill, length)
        for bucket in sorted(self.buckets, reverse=True):
            inputs = (self._state_indices[bucket.groups], bucket.shape)
            name, depth = "{}_to_{}_drafts".format(*bucket.shape), max(bucket.shape)
            name = self._of_batch(name, bucket.groups)
            yield Shape(depth, f"decode_{name}", Step.decode, inputs, self._decode, bucket)
        for groups in sorted(self._catch_up, reverse=True):
            index = (self._state_indices[groups],)
            name = self._of_batch("catch_up", groups)
            yield Shape(0, name, Step.catch_up, index, self._catch_up, groups)
        for first in self._first_token:
            chain, count = first
            name, ended = "first_token" if count == 1 else "first_tokens", (self._ended[count], chain)
            name = f"{name}_{chain}_drafts"
            # Captured in no time, they need not wait for their rounds.
            of_depth = chain if self.graph_mode is None else None
            yield Shape(of_depth, name, Step.first_token, ended, self._first_token, first)

    def _of_batch(self, name: str, size: int) -> str:
        """The name of a program for batches of that size, or for all that share one."""
        return name if size in self._sharing else f"{name}_of_{size}"

    def _is_plain(self, shape: Shape) -> bool:
        """Whether its graph is captured of the code as it is."""
        is_round = self.is_compiled and shape.method not in _PLAIN_METHODS
        return self.graph_mode is not None and not (is_round and shape.depth not in self.plain_depths)

    def _make_ready(self, shape: Shape, program: Program) -> None:
        for _ in range(_WARM_UP_CALLS if self.graph_mode == "reduce-overhead" else 1):
            program(*shape.inputs)
        is_captured = self.graph_mode == "replay"
        shape.programs[shape.key] = (
            self._capture(program, shape.inputs) if is_captured else torch.no_grad()(program)
        )

    def _capture(self, program: Program, inputs: Inputs) -> Program:
        begin_s = time.perf_counter()
        captured = capture(program, inputs, self._pool)
        self.capture_s += time.perf_counter() - begin_s
        return captured

    def _mark_static(self) -> None:
        sizes = self._state_indices
        apart = [index for size, index in sizes.items() if size not in self._sharing]
        mark_static([*self.step.parameters(), *self.step.buffers(), *apart])
        mark_sizes([sizes[size] for size in self._sharing])

    def _layout(self) -> dict[str, Any]:
        """What saved programs assume of the tensors they are given. Whole rounds do not touch what lies
        between halves, which is made when the first half needs it."""
        tensors = [*self.step.named_parameters(), *self.step.named_buffers()]
        kept = [(name, tensor) for name, tensor in tensors if name not in self.step.between_halves]
        return {name: [list(t.shape), list(t.stride()), str(t.dtype)] for name, t in kept}

    def check_layout(self, saved: Path) -> None:
        """Raise ValueError if the programs in `saved` were made for tensors of another layout."""
        stored, wanted = json.loads((saved / _LAYOUT_NAME).read_text()), self._layout()
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"graph_cache must be made for {name}={wanted.get(name)}, got {stored.get(name)}; export "
                    "it again with `compiled-mtp export`"
                )

    def _check_chain(self, chain: int) -> None:
        if (chain, 1) not in self._first_token:
            known = sorted({known for known, _ in self._first_token})
            raise ValueError(f"chain must be one of {known}, got {chain}; name it when the programs are made")

    def _upload_slots(self, bucket: Bucket, slots: tuple[int, ...]) -> torch.Tensor:
        """The static input of a bucket, which holds `slots` and then padding."""
        size = bucket.groups
        state_index = self._state_indices[size]
        if self._batches.get(size) != slots:
            self._batches.pop(size, None)  # in case the upload fails
            self._upload(state_index, slots + (0,) * (size - len(slots)))
            self._batches[size] = slots
        return state_index

    def _write_masks(self, masks: torch.Tensor | None) -> None:
        """Have the accept that is launched next masked by `masks` [rows, words], its other rows by none.

        Every accept says so for itself: one that failed, or was interrupted, leaves its masks behind. What
        the rows hold is known here, so that a round without masks launches nothing more unless the one
        before it had some.
        """
        rows, num_stale = 0 if masks is None else masks.shape[0], self._masked_rows
        # Rather too many than too few: an error or an interrupt may come between any two lines.
        self._masked_rows = max(rows, num_stale)
        if masks is not None:
            self.step.masks[:rows] = masks
        if num_stale > rows:
            self.step.masks[rows:num_stale] = -1
        self._masked_rows = rows

    def _call_half(self, name: str, bucket: Bucket, state_index: torch.Tensor) -> Any:
        """Run half a round, and capture it once: its operators have kernels and counters then."""
        key, inputs = (name, bucket), (state_index, bucket.shape)
        output = self._halves[key](*inputs)
        if key in self._uncaptured:
            self._uncaptured.remove(key)
            try:
                self._halves[key] = self._capture(self._halves[key], inputs)
            except RuntimeError as error:  # No memory for its pool, say: who decodes is not to end.
                logger.warning("half a round of %s runs without a graph: %s", key, error)
        return output

    def _zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _upload(self, static: torch.Tensor, values: Sequence[int]) -> None:
        host = torch.tensor(values, dtype=static.dtype)
        # The caching host allocator keeps a pinned block until the copy that reads it has run.
        static.copy_(host.pin_memory() if static.is_cuda else host, non_blocking=True)
