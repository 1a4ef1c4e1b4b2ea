"""Time the whole draft-and-verify step of a released shape, in units of the time its bytes need.

    python tools/bench_step.py --shape 4b --mtp-step 0,3 --batch 1,8,32
    python tools/bench_step.py --shape 27b --mtp-step 3 --batch 1 --context 131072 --graph-mode uncompiled

Dummy weights, synthetic acceptance, the real engine loop. Prints a table and one JSON line a row:
milliseconds a step (median and 90th percentile of the wall clock between steps), the floor (bytes that the
step must read and write, over the read bandwidth measured in the same run), their ratio, host microseconds
a step (median, least and most: what shares the cores shows in it), the share of the step in which the GPU
idles, kernels a step, tokens a second, and milliseconds a token of one request. Nothing is printed for a
shape whose decode rows are not bit-equal between the buckets that are timed. --beside FILE adds to each row
what another engine, or another commit, took for it on such a GPU (saved_rows.py has the format, which the
printed JSON lines are in too).

A context is prefilled by the engine, from random ids; one of more than 4,096 tokens in chunks of 2,048 (27B:
131,072 tokens are 64 launches; their keys and values take 9.1 GB). One depth, one batch and --graph-mode
uncompiled are the quickest way to a figure; kernels that Inductor would fuse are then launched singly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_op import read_bandwidth
from op_cases import SHAPES
from saved_rows import Row, describe_beside, read_rows, rows_beside
from torch._dynamo.utils import calculate_time_spent

from compiled_mtp import __version__
from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.artifacts import PROGRAMS_NAME, save, use_directory
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.layers import Linear
from compiled_mtp.ops.linear import linear
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.limits import Limits

LAYERS = {"0.8b": 24, "4b": 32, "9b": 32, "27b": 64, "35b-a3b": 40}
TIED = {"0.8b", "4b"}
WARM_UP_STEPS, TIMED_STEPS = 20, 80
FP8_SIZE = 40.0


def model_config(name: str, quantized: bool = False) -> ModelConfig:
    """The released shape, without its checkpoint; `quantized` as the FP8 release has it."""
    shape, layers = SHAPES[name], LAYERS[name]
    return ModelConfig(
        family="qwen3_5_moe" if shape.experts else "qwen3_5",
        num_layers=layers,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        num_q_heads=shape.query_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=shape.head_dim // 4,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        linear_num_key_heads=shape.linear_key_heads,
        linear_num_value_heads=shape.linear_value_heads,
        linear_key_head_dim=shape.linear_head_dim,
        linear_value_head_dim=shape.linear_head_dim,
        conv_kernel=4,
        is_full_attention=tuple((index + 1) % 4 == 0 for index in range(layers)),
        intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_intermediate,
        shared_expert_intermediate_size=shape.expert_intermediate,
        norm_topk_prob=True,
        tie_word_embeddings=name in TIED,
        mtp_num_layers=1,
        gate_activation="silu",
        dtype="bfloat16",
        max_position_embeddings=262144,
        eos_token_ids=(),
        quantized=quantized,
    )


def fill_random(parameters: Mapping[str, torch.Tensor]) -> None:
    """Weights of a scale that keeps activations finite; gates as a trained model has them."""
    for name, parameter in parameters.items():
        if name.endswith("a_log"):
            parameter.uniform_(-1.0, 2.0)
        elif name.endswith("dt_bias"):
            parameter.uniform_(-4.0, -1.0)
        elif parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("mixer.norm_weight") else 0.0)
        elif name.endswith("_scale"):
            # Of columns in blocks of 128, each FP8 value being of size FP8_SIZE.
            parameter.fill_(0.7 * (128 * parameter.shape[-1]) ** -0.5 / FP8_SIZE)
        else:
            # Every expert alike costs no more memory than one: the random numbers of the first are copied.
            first = parameter if parameter.dim() == 2 else parameter[0]
            if first.dtype == torch.float8_e4m3fn:
                first.copy_(FP8_SIZE * torch.randn(first.shape, device=first.device))
            else:
                first.normal_(0.0, 0.7 * first.shape[-1] ** -0.5)
            if parameter.dim() == 3:
                # As bytes where they are FP8, which torch cannot roll on a GPU.
                whole = parameter.view(torch.uint8) if parameter.element_size() == 1 else parameter
                for index in range(1, parameter.shape[0]):
                    whole[index].copy_(whole[0].roll(index, 0))


def rate_for(mean_new_tokens: float, mtp_step: int) -> float:
    """The acceptance rate r at which 1 + r + ... + r^mtp_step is `mean_new_tokens`.

    Raises ValueError for what no rate gives.
    """
    if not 1 <= mean_new_tokens <= mtp_step + 1:
        raise ValueError(f"accept must be from 1 to {mtp_step + 1} tokens a round, got {mean_new_tokens}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**k for k in range(mtp_step + 1)) < mean_new_tokens:
            low = middle
        else:
            high = middle
    return low


def floor_bytes(runner: Runner, batch: int, context: int) -> dict[str, float]:
    """Bytes that one step must read and write, by item; the model's shape decides, not the implementation."""
    config, step, mtp_step = runner.spec.model, runner.step, runner.step.mtp_step
    rows = batch * (mtp_step + 1)
    embedding = step.target.embed.weight
    head = step.target.head_weight.nbytes

    def expert_share(tokens: int) -> float:
        """Distinct experts of independently routed tokens, over all experts."""
        return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens

    def layer_bytes(module: torch.nn.Module, tokens: int) -> float:
        total = 0.0
        for name, parameter in module.named_parameters():
            if ".ffn." in f".{name}" and parameter.dim() == 3:
                one = parameter.nbytes / parameter.shape[0]
                total += one + one * config.num_experts * expert_share(tokens)
            else:
                total += parameter.nbytes
        return total

    state = sum(b[0].nbytes for name, b in step.state_cache.named_buffers() if name.endswith("state"))
    kv = next(step.kv_cache.buffers())
    block = kv[0].nbytes / step.kv_cache.block_size
    items = {
        "target_layers": sum(layer_bytes(layer, rows) for layer in step.target.layers),
        "target_head": float(head),
        "gdn_state": 2.0 * state * batch,
        "target_kv": block * context * batch * config.num_attention_layers,
        "embedding": float(rows * embedding[0].nbytes),
    }
    if step.draft is not None:
        chain = (mtp_step - 1) * layer_bytes(step.draft, batch)
        items["draft_layers"] = layer_bytes(step.draft, rows) + chain
        own = (step.draft_head, step.draft_head_scale)
        rows_read = sum(part.nbytes for part in own if part is not None) or head
        items["draft_heads"] = float(rows_read * mtp_step)
        items["draft_kv"] = block * context * batch * mtp_step
    return items


@dataclass
class Loop:
    """The engine's loop over requests of random ids, without text."""

    runner: Runner
    scheduler: Scheduler

    def step(self) -> int:
        """One step; the number of new tokens."""
        self.scheduler.update(self.runner.run(self.scheduler.schedule()))
        return sum(len(output.new_token_ids) for output in self.scheduler.take_outputs())


def start_loop(runner: Runner, batch: int, context: int) -> Loop:
    """`batch` requests with `context` tokens each, prefilled."""
    spec, memory = runner.spec, runner.memory
    chunk = spec.prefill_chunk
    limits = Limits(
        max_batch=batch,
        num_blocks=memory.num_blocks,
        block_size=spec.config.block_size,
        max_model_len=memory.max_model_len,
        prefill_chunk=chunk,
        mtp_step=spec.mtp_step,
        max_in_flight=spec.max_in_flight,
    )
    scheduler = Scheduler(limits)
    generator = torch.Generator().manual_seed(batch)
    # The first request decodes a round for every chunk of the others' prefill.
    rounds = batch * -(-context // chunk) + WARM_UP_STEPS + TIMED_STEPS + 64
    most = min(rounds * (spec.mtp_step + 1), memory.max_model_len - context)
    for index in range(batch):
        ids = torch.randint(0, spec.model.vocab_size, (context,), generator=generator).tolist()
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, seed=index)
        request = Request(str(index), ids, params)
        limits.fit(request)
        scheduler.add(request)
    loop = Loop(runner, scheduler)
    while len(scheduler.running) < batch:
        loop.step()
    return loop


@torch.no_grad()
def check_rows(runner: Runner, batches: list[int]) -> None:
    """Raise AssertionError unless every projection's rows are bit-equal in every bucket that is timed."""
    target = runner.step.target
    width = runner.step.mtp_step + 1
    weights = {
        module.weight.shape: (module.weight, module.weight_scale)
        for module in target.modules()
        if isinstance(module, Linear)
    }
    for weight, scale in [*weights.values(), (target.head_weight, None)]:
        x = torch.randn(max(batches) * width, weight.shape[1], device=runner.spec.device)
        x = x.to(target.head_weight.dtype)
        whole = linear(x, weight, scale, True, False)
        for batch in batches:
            part = linear(x[: batch * width], weight, scale, True, False)
            assert torch.equal(part, whole[: batch * width]), f"rows of {tuple(weight.shape)} depend on M"


def end_loop(loop: Loop) -> None:
    """Forget what still runs; the runner, and its ranks, stay."""
    loop.scheduler.forget_all()
    loop.runner.drop_launches()


class Timed(NamedTuple):
    """Steps by the clock: seconds of each, host microseconds of each, new tokens and seconds of all."""

    step_s: list[float]
    host_us: list[float]
    tokens: int
    total_s: float


def time_steps(loop: Loop) -> Timed:
    """TIMED_STEPS of a loop that has just started."""
    runner = loop.runner
    for _ in range(WARM_UP_STEPS):
        loop.step()
    torch.cuda.synchronize()
    # What is in flight has ended by now: its result would be a step's tokens in no time.
    loop.step()
    runner.waited_s = 0.0
    times, host_times, tokens = [], [], 0
    begin = last = time.perf_counter()
    for _ in range(TIMED_STEPS):
        waited_s = runner.waited_s
        tokens += loop.step()
        now = time.perf_counter()
        times.append(now - last)
        host_times.append(1e6 * (now - last - (runner.waited_s - waited_s)))
        last = now
    return Timed(times, host_times, tokens, last - begin)


def measure(loop: Loop, batch: int, context: int, bandwidth: float) -> dict[str, Any]:
    """One row of the table, but for its kernels, from a loop that has just started."""
    runner = loop.runner
    times, host_times, tokens, total = time_steps(loop)
    slots, shape = tuple(sorted(loop.scheduler.running)), RoundShape(*[runner.step.mtp_step] * 2)
    assert len(slots) == batch, f"{batch - len(slots)} requests ended before the measurement did"
    runner.programs.decode(slots, shape)
    torch.cuda.synchronize()
    gpu_ms = gpu_time_ms(runner, slots)
    items = floor_bytes(
        runner, batch, context + (WARM_UP_STEPS + TIMED_STEPS // 2) * tokens // TIMED_STEPS // batch
    )
    floor_ms = 1e3 * sum(items.values()) / bandwidth
    step_ms = 1e3 * statistics.median(times)
    return {
        "batch": batch,
        "step_ms": round(step_ms, 3),
        "p90_ms": round(1e3 * statistics.quantiles(times, n=10)[-1], 3),
        "gpu_ms": round(gpu_ms, 3),
        "floor_ms": round(floor_ms, 3),
        "ratio": round(step_ms / floor_ms, 3),
        "host_us": round(statistics.median(host_times), 1),
        "host_min_us": round(min(host_times), 1),
        "host_max_us": round(max(host_times), 1),
        "gpu_idle_share": round(max(0.0, 1 - gpu_ms / step_ms), 4),
        "tokens_per_s": round(tokens / total, 1),
        "tpot_ms": round(1e3 * total * batch / tokens, 3),
        "new_tokens_per_round": round(tokens / TIMED_STEPS / batch, 3),
        "bytes": {name: round(value) for name, value in items.items()},
    }


@torch.no_grad()
def gpu_time_ms(runner: Runner, slots: tuple[int, ...]) -> float:
    """Milliseconds of the GPU alone for one step: launches back to back, which the host runs ahead of."""
    spans, shape = [], RoundShape(*[runner.step.mtp_step] * 2)
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(8):
            runner.programs.decode(slots, shape)
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) / 8)
    return statistics.median(spans)


@torch.no_grad()
def trace_kernels(loop: Loop, batch: int) -> list[tuple[str, float]]:
    """`own_spans` of one step of `batch` of the loop's requests, the first, which may have gained some tokens
    while the others were prefilled. A profiler that was once attached makes all later launches cost the host
    more: nothing is timed after this."""
    from torch.profiler import ProfilerActivity, profile

    runner = loop.runner
    slots = tuple(sorted(loop.scheduler.running))[:batch]
    shape = RoundShape(*[runner.step.mtp_step] * 2)
    runner.programs.decode(slots, shape)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        runner.programs.decode(slots, shape)
        torch.cuda.synchronize()
    return own_spans(trace.events())


def own_spans(events: Iterable[Any]) -> list[tuple[str, float]]:
    """Kernels in the order in which they end: name, microseconds since the one before ended.

    Dependent launches overlap, so a kernel's own span would count the time in which it only waits.
    """
    on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.end, event.time_range.start, event.name) for event in on_device)
    last = spans[0][1]
    result = []
    for end, _, name in spans:
        result.append((name, end - last))
        last = end
    return result


def measure_all(
    runner: Runner, batches: list[int], context: int, bandwidth: float
) -> Iterator[tuple[dict[str, Any], list[tuple[str, float]]]]:
    """The rows and their kernels, traced when all has been timed, with the requests of the largest batch: to
    prefill others takes longer than to time them."""
    rows = []
    for batch in batches:
        begin = time.perf_counter()
        loop = start_loop(runner, batch, context)
        prefill_s = time.perf_counter() - begin
        row = measure(loop, batch, context, bandwidth)
        rows.append(row | {"context": context, "prefill_s": round(prefill_s, 1)})
        if batch != batches[-1]:
            end_loop(loop)
    for row in rows:
        yield row, trace_kernels(loop, row["batch"])
    end_loop(loop)


def print_kernels(kernels: list[tuple[str, float]], steps: int = 1) -> None:
    """Where a step's time goes, by kernel, in the mean of `steps` of them."""
    by_name: dict[str, list[float]] = {}
    for name, span in kernels:
        by_name.setdefault(name, []).append(span)
    print("  kernels      us a step   us each  name")
    for name, spans in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        count, total = len(spans) / steps, sum(spans) / steps
        print(f"  {count:7.0f} {total:12.1f} {statistics.median(spans):9.2f}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", required=True, choices=sorted(LAYERS))
    parser.add_argument("--mtp-step", default="0,3", help="depths, separated by commas")
    parser.add_argument("--batch", default="1,4,8,16,32", help="requests, separated by commas")
    parser.add_argument("--accept", type=float, default=2.6, help="mean new tokens a round at mtp_step 3")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens, a multiple of 64")
    parser.add_argument(
        "--graph-mode",
        default="replay",
        help="replay, reduce-overhead, auto, both, or uncompiled: rounds are captured as they are, which "
        "starts in seconds and takes more kernels",
    )
    parser.add_argument(
        "--fp8",
        nargs="?",
        const="w8a8",
        choices=("w8a8", "w8a16"),
        help="block-128 FP8 weights, as an FP8 release has, and their recipe; alone: w8a8",
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="time the start alone and write a graph cache"
    )
    parser.add_argument("--graph-cache", type=Path, metavar="FILE", help="start from what --export wrote")
    parser.add_argument("--draft-vocab", help="draft from that many lowest ids, or from those in a file")
    parser.add_argument("--draft-head-dtype", default="auto", help="float8_e4m3fn for drafts' rows in FP8")
    parser.add_argument("--kernels", action="store_true", help="print where a step's time goes, by kernel")
    parser.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="time N GPUs beside one instead: bench_ranks.py"
    )
    parser.add_argument("--layers", type=int, help="fewer layers, to find what one costs")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="saved rows to stand beside ours")
    arguments = parser.parse_args()
    try:
        saved = read_rows(arguments.beside) if arguments.beside else []
    except (OSError, ValueError) as error:
        parser.exit(2, f"bench_step: --beside: {error}\n")
    if not torch.cuda.is_available():
        parser.exit(2, "bench_step needs a CUDA device; torch finds none\n")
    if arguments.tensor_parallel is not None:
        sys.exit(subprocess.run(ranks_command(arguments)).returncode)
    batches = sorted(int(batch) for batch in arguments.batch.split(","))
    modes = ["replay", "reduce-overhead"] if arguments.graph_mode == "both" else [arguments.graph_mode]
    depths = [int(step) for step in arguments.mtp_step.split(",")]
    if "uncompiled" in modes and (arguments.export or arguments.graph_cache):
        parser.exit(2, "bench_step: a graph cache holds compiled code; give another --graph-mode\n")
    if len(modes) * len(depths) == 1:
        run(arguments, batches, depths[0], modes[0], saved)
        return
    if arguments.export or arguments.graph_cache:
        parser.exit(2, "bench_step: a graph cache is made for one --mtp-step and one --graph-mode\n")
    for depth in depths:
        for mode in modes:
            # In a process of its own: what one has traced would slow down the next.
            given = [*sys.argv[1:], "--mtp-step", str(depth), "--graph-mode", mode]
            status = subprocess.run([sys.executable, __file__, *given]).returncode
            if status:
                sys.exit(status)


def ranks_command(arguments: argparse.Namespace) -> list[str]:
    """The command of bench_ranks.py, which ranks can import what they need from, for the last depth."""
    tool = str(Path(__file__).with_name("bench_ranks.py"))
    command = [sys.executable, tool, "--shape", arguments.shape, "--ranks", str(arguments.tensor_parallel)]
    command += ["--mtp-step", arguments.mtp_step.split(",")[-1], "--batch", arguments.batch]
    command += ["--accept", str(arguments.accept), "--context", str(arguments.context)]
    command += ["--fp8"] if arguments.fp8 is not None else []
    command += ["--uncompiled"] if arguments.graph_mode == "uncompiled" else []
    return command + (["--layers", str(arguments.layers)] if arguments.layers is not None else [])


def start_by_phase(startup_s: float, capture_s: float) -> dict[str, float]:
    """Seconds of this process's start: what Dynamo traces, what its backends make of that, captures by hand,
    and the rest (first launches, which compile our kernels, caches, CUDA-graph trees)."""
    spent = calculate_time_spent()
    traced, generated = spent.get("entire_frame_compile", 0.0), spent.get("backend_compile", 0.0)
    phases = {"trace": traced - generated, "generate": generated, "capture": capture_s}
    phases |= {"rest": startup_s - traced - capture_s}
    return {name: round(seconds, 1) for name, seconds in phases.items()}


def case_of(arguments: argparse.Namespace, mtp_step: int, device: str) -> dict[str, Any]:
    """The fields of a row that say what was measured (saved_rows.py), but for the batch."""
    # Of fewer layers it is no released shape, and stands beside none.
    shape = arguments.shape + (f" of {arguments.layers} layers" if arguments.layers else "")
    return {
        "engine": f"compiled-mtp {__version__}",
        "device": device,
        "shape": shape,
        "weights": "fp8" if arguments.fp8 else "bf16",
        "recipe": arguments.fp8 or "bf16",
        "mtp_step": mtp_step,
        "context": arguments.context,
    }


def model_of(arguments: argparse.Namespace) -> ModelConfig:
    """The shape that the flags name, perhaps of fewer layers."""
    model = model_config(arguments.shape, arguments.fp8 is not None)
    if arguments.layers is None:
        return model
    kept = model.is_full_attention[: arguments.layers]
    return replace(model, num_layers=arguments.layers, is_full_attention=kept)


def config_of(
    arguments: argparse.Namespace, batches: list[int], mtp_step: int, mode: str, rate: float
) -> EngineConfig:
    """The engine of one depth and graph mode."""
    # A short chunk costs a start that compiles least, but the first requests gain tokens while the others are
    # prefilled; of a long context every chunk reads every weight.
    prefill_chunk = 2048 if arguments.context > 4096 else 512 if mode == "uncompiled" else 64
    # What the first request gains in the rounds between the others' chunks.
    gained = max(64, -(-arguments.context // prefill_chunk) * (mtp_step + 1)) * max(batches)
    return EngineConfig(
        model=Path(__file__),
        device="cuda",
        dtype="bfloat16",
        weight_recipe=arguments.fp8 or "auto",
        mtp_step=mtp_step,
        max_batch=max(batches),
        batch_sizes=tuple(batches),
        max_model_len=arguments.context + 2048 + gained,
        prefill_chunk=prefill_chunk,
        compile="off" if mode == "uncompiled" else "on",
        graph_mode="auto" if mode == "uncompiled" else mode,
        graph_cache=arguments.graph_cache,
        synthetic_acceptance=rate,
        draft_vocab=arguments.draft_vocab,
        draft_head_dtype=arguments.draft_head_dtype,
        # Nothing here is prefilled twice: its memory is the blocks'.
        prefix_cache=False,
    )


def run(
    arguments: argparse.Namespace, batches: list[int], mtp_step: int, mode: str, saved: list[Row]
) -> None:
    """Time one depth and graph mode, or export it, and print beside the saved rows."""
    bandwidth = read_bandwidth()
    # The rate of one draft is a property of the model: the same at every depth.
    rate = rate_for(arguments.accept, 3)
    print(
        f"{arguments.shape}: read bandwidth {bandwidth / 1e12:.2f} TB/s, acceptance rate {rate:.3f}",
        flush=True,
    )
    if arguments.export:
        # Private and empty: what an earlier run has compiled must not shorten this start.
        directory = Path(tempfile.mkdtemp())
        use_directory(directory)
    begin, loaded = time.perf_counter(), list[float]()

    def fill(parameters: Mapping[str, torch.Tensor]) -> None:
        fill_random(parameters)
        torch.cuda.synchronize()
        loaded.append(time.perf_counter())

    save_to = directory / PROGRAMS_NAME if arguments.export else None
    model, config = model_of(arguments), config_of(arguments, batches, mtp_step, mode, rate)
    spec = resolve(config, model, model.vocab_size, is_checkpoint=False)
    runner = Runner(spec, None, fill, save_to=save_to)
    startup_s = time.perf_counter() - loaded[0]
    phases = start_by_phase(startup_s, runner.programs.capture_s)
    mode = str(runner.programs.graph_mode) if mode == "auto" else mode
    if arguments.export:
        begin = time.perf_counter()
        size = save(arguments.export, directory, runner.cache_key())
        export_s = time.perf_counter() - begin
        print(
            f"S={mtp_step} {mode} {len(runner.programs.buckets)} buckets: cold start {startup_s:.1f} s "
            f"{phases}, {size / 1e6:.1f} MB written in {export_s:.1f} s"
        )
        return
    check_rows(runner, batches)
    fixed = case_of(arguments, mtp_step, torch.cuda.get_device_name()) | {"graph_mode": mode}
    for row, kernels in measure_all(runner, batches, arguments.context, bandwidth):
        if arguments.kernels:
            print_kernels(kernels)
        row = fixed | row | {"kernels": len(kernels), "startup_s": round(startup_s, 1)}
        row |= {"start_s_by_phase": phases}
        row |= {"buckets": len(runner.programs.buckets), "bandwidth_tb_s": round(bandwidth / 1e12, 3)}
        row |= {"total_s": round(time.perf_counter() - begin, 1)}
        print_row(row, startup_s, saved)
    runner.close()


def print_row(row: dict[str, Any], startup_s: float, saved: list[Row]) -> None:
    """A row as text, the saved rows of its case, and both as JSON."""
    print(
        f"S={row['mtp_step']} {row['graph_mode']:15} B={row['batch']:<3} step {row['step_ms']:7.3f} ms  "
        f"gpu {row['gpu_ms']:7.3f}  floor {row['floor_ms']:7.3f}  ratio {row['ratio']:.2f}  "
        f"host {row['host_us']:5.1f} us ({row['host_min_us']:.0f} to {row['host_max_us']:.0f})  "
        f"idle {row['gpu_idle_share']:.1%}  kernels {row['kernels']}  "
        f"{row['tokens_per_s']:.0f} tok/s  start {startup_s:.0f} s"
    )
    beside = rows_beside(saved, row)
    if beside:
        print(f"  beside: {describe_beside(beside, row['step_ms'])}")
    print(json.dumps(row | {"beside": beside}), flush=True)


if __name__ == "__main__":
    main()
