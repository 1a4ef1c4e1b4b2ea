"""Compiled code: the compiler reduces no rows and copies no cache, and serving compiles nothing."""

from __future__ import annotations

import dataclasses
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_mtp.graphs.buckets import Bucket, RoundShape
from compiled_mtp.graphs.compile import compile_program, compiler_settings, mark_sizes, without_collector
from compiled_mtp.models.linear import Linear
from compiled_mtp.models.weight_format import FP8, PLAIN, W8A8, WeightFormat, four_bits
from compiled_mtp.ops.registry import NAMESPACE
from compiled_mtp.request import SamplingParams
from compiled_mtp.step import Step
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine

# The names of floating-point reductions in Inductor's C++ code.
REDUCTION = re.compile(r"tmp_acc\d+(_vec)?\s*=|vec_reduce_all|welford|cascade_sum")


class Generated(BaseException):
    """Replaces the C++ compiler, which takes most of the time: the tests only read the text."""


def generated_code(step: Step, groups: int, sizes: tuple[int, ...] = ()) -> str:
    """Return the code that Inductor makes of a decode bucket, or of one shared with these other sizes."""

    def stop(text: str) -> None:
        code.append(text)
        raise Generated

    code: list[str] = []
    torch._dynamo.reset()
    index = torch.zeros(groups, dtype=torch.int32)
    mark_sizes([index, *(torch.zeros(size) for size in sizes)] if sizes else [])
    with (
        compiler_settings(),
        torch.no_grad(),
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(GraphLowering, "save_output_code", stop)
        program = compile_program(step.decode, f"decode_{groups}", None)
        with pytest.raises(Generated):
            program(index, RoundShape(*[step.mtp_step] * 2))
    return code[0]


class Called(TorchDispatchMode):
    """Records the names of our operators as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def gates_first(nodes: list[Any], *rest: Any) -> list[Any]:
    """Return the nodes of Inductor's scheduler with b|a before in_proj, an order that data flow allows."""

    def name(node: Any) -> str:
        overload = getattr(node.node, "op_overload", None)
        return "" if overload is None else overload._schema.name.partition("::")[2]

    for place in [i for i, node in enumerate(nodes) if name(node) == "linear_side"]:
        nodes.insert(max(i for i in range(place) if name(nodes[i]) == "linear"), nodes.pop(place))
    return nodes


def test_a_program_takes_no_cached_code_of_other_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine of batches of 2, 4 and 8 opens after one of 3 and 8, whose code is in the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tag = torch.compiler.config.cache_key_tag
    for sizes in ((8, 3), (8, 4, 2)):
        torch._dynamo.reset()
        tensors = [torch.arange(size * 5.0).view(size, 5) for size in sizes]
        mark_sizes(tensors)
        with compiler_settings(sizes), torch.no_grad():
            program = compile_program(lambda x: (x * 2 + 1).sum(1), f"program_of_{len(sizes)}", None)
            for tensor in tensors:
                assert torch.equal(program(tensor), (tensor * 2 + 1).sum(1))
    assert torch.compiler.config.cache_key_tag == tag


@pytest.mark.parametrize(("sizes", "has_text"), [((), False), ((4,), True)])
def test_generated_code_reduces_no_floating_point_row_copies_no_cache_and_keeps_the_order_of_calls(
    sizes: tuple[int, ...], has_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gates with their own weight, as beside FP8.
    monkeypatch.setattr("compiled_mtp.models.layers.PLAIN", None)
    # Layers of each kind share memory: two of each.
    config = tiny.tiny_config(num_layers=4, is_full_attention=(False, True) * 2)
    step = tiny.build_step(config, 1, has_text=has_text)
    with torch.no_grad(), Called() as called:
        step.decode(torch.zeros(2, dtype=torch.int32), RoundShape(1, 1))
    # As if this order took less memory: tests/step/test_fences.py checks only the order of calls.
    monkeypatch.setattr("torch._inductor.memory.reorder_for_peak_memory", gates_first)
    code = generated_code(step, 2, sizes)
    assert called.names.count("linear_side") == 2
    assert called.names.count("find_drafts") == has_text
    assert re.findall(rf"torch\.ops\.{NAMESPACE}\.(\w+)\.default\(", code) == called.names
    kernels = re.findall(r"cpp_fused_\w+\s*=\s*async_compile.*?'''\)", code, re.DOTALL) or [code]
    for kernel in kernels:
        for line in kernel.splitlines():
            if REDUCTION.search(line):
                # Integer reductions are exact in every order: the count of accepted drafts.
                assert "int64_t" in kernel, kernel
                assert "float tmp_acc" not in kernel, kernel
    buffers = [*step.kv_cache.buffers(), *step.state_cache.buffers()]
    if step.slots.token_ids is not None:
        buffers.append(step.slots.token_ids)
    shapes = {tuple(buffer.shape) for buffer in buffers}
    allocated = re.findall(r"empty_strided\w*\(\(([^()]+?),?\)", code)
    assert allocated
    assert not shapes & {tuple(map(int, shape.split(", "))) for shape in allocated if "s" not in shape}


def test_row_metadata_is_computed_once_per_step() -> None:
    """More layers compute no more of it.

    By default, Inductor gathers cursors and positions again for every operator that reads them.
    """
    kernels, buffers = [], []
    for layers in (2, 4):
        config = tiny.tiny_config(num_layers=layers, is_full_attention=(False, True) * (layers // 2))
        code = generated_code(tiny.build_step(config, 2), 1)
        call = code[code.index("def call(self, args):") :]
        kernels.append(len(re.findall(r"^ +cpp_fused_\w+\(", call, re.MULTILINE)))
        buffers.append(len(re.findall(r"empty_strided\w*\(.*torch\.int(?:32|64)\)", call)))
    assert kernels[0] == kernels[1] > 0
    # Fewer if other buffers live longer and one more can be reused.
    assert buffers[0] >= buffers[1] > 0


def test_the_check_on_reductions_can_fail() -> None:
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        program = torch.compile(lambda x: (x * x).sum(-1), fullgraph=True, dynamic=False)
        _, code = run_and_get_code(program, torch.randn(4, 512))
    assert REDUCTION.search("\n".join(code))


def test_nothing_compiles_while_serving_and_tokens_are_the_uncompiled_ones(tmp_path: Path) -> None:
    """Step.decode, prefill and first_token compile as one graph each, and a second shape is an error."""
    write_checkpoint(tmp_path, num_layers=4, hidden_size=64, num_value_heads=1, intermediate_size=64)
    prompts = [[5], list(range(70)), list(range(3))]
    given = SamplingParams(max_tokens=20, temperature=0.7, seed=3, ignore_eos=True)
    # The first request outlives the others and repeats itself: wide rounds verify drafts from its text.
    params = [given.model_copy(update={"allowed_token_ids": [5], "max_tokens": 160}), given, given]
    outputs = []
    for compile in ("off", "on"):
        torch._dynamo.reset()
        engine = make_engine(tmp_path, mtp_step=2, max_batch=2, batch_sizes=(2,), compile=compile)
        with torch.compiler.set_stance("fail_on_recompile" if compile == "on" else "default"):
            outputs.append([output.new_token_ids for output in engine.generate(prompts, params)])
    assert outputs[0] == outputs[1]
    stats = engine.stats().speculation
    assert stats.lookup_accepted > 2 * stats.lookup_rounds > 0
    program = engine.runner.programs._decode[Bucket(6, RoundShape(2, 2))]
    with (
        torch.no_grad(),
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="recompil"),
    ):
        program(torch.zeros(3, dtype=torch.int32), RoundShape(2, 2))


def test_batch_sizes_share_a_program_that_is_traced_and_saved_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    prompts = [[5], list(range(70)), list(range(3))]
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=3, ignore_eos=True)
    given: dict[str, Any] = {"mtp_step": 1, "max_batch": 3, "batch_sizes": (2,), "lookup": "off"}
    expected = make_engine(tmp_path, compile="off", **given).generate(prompts, params)
    torch._dynamo.reset()
    engine = make_engine(tmp_path, compile="on", save_to=tmp_path / "saved", **given)
    assert [bucket.groups for bucket in engine.runner.programs.buckets] == [2, 3]
    names = {"decode_1_to_1_drafts", "prefill_64", "first_token_1_drafts", "first_tokens_1_drafts"}
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"layout.json", *names}
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (3, 2):
            outputs = engine.generate(prompts[:count], params)
            for output, wanted in zip(outputs, expected, strict=False):
                assert output.new_token_ids == wanted.new_token_ids


def test_code_that_asks_for_the_batch_size_is_an_error() -> None:
    inputs = [torch.zeros(2), torch.zeros(8)]
    mark_sizes(inputs)
    torch._dynamo.reset()
    program = compile_program(lambda x: x + 1 if x.shape[0] > 4 else x - 1, "asking", None)
    with pytest.raises(Exception, match=r"Constraints violated .*\n.* <= 8 satisfy the generated guard"):
        program(inputs[1])


class Traced(Exception):
    """Stands in for running the traced code."""


def one_four_or_two(weight: torch.Tensor, rows: int, whole_n: int = 0, whole_k: int = 0) -> int:
    return 1 if rows <= 16 else 4 if rows <= 128 else 2


# Sizes of which every product has whole groups of 128 columns.
WHOLE_GROUPS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_num_value_heads": 4,
    "num_layers": 2,
    "is_full_attention": (False, True),
}
# Of a mixture and its shared expert, whose stacks are one.
WHOLE_EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}


@pytest.mark.parametrize("is_mixture", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "form", [PLAIN, FP8, W8A8, four_bits(128, torch.float16)], ids=lambda form: form.name
)
def test_a_round_asks_for_no_batch_size_if_partials_follow_rows(
    monkeypatch: pytest.MonkeyPatch, form: WeightFormat, is_mixture: bool
) -> None:
    """As on a GPU, in every format: one split-K partial up to 16 rows, four up to 128, two above."""
    monkeypatch.setattr("compiled_mtp.models.linear.count_partials", one_four_or_two)
    monkeypatch.setattr("compiled_mtp.models.linear.count_w8a8_partials", one_four_or_two)
    config = tiny.tiny_config(**WHOLE_GROUPS)
    if is_mixture:
        config = dataclasses.replace(config, **tiny.MOE | WHOLE_EXPERTS)
    plain = tiny.build_step(config, 3, max_batch=40, dtype=torch.bfloat16)
    names = [name for name, _ in plain.target.named_parameters()]
    names += [f"mtp.{name}" for name, _ in plain.draft.named_parameters()]
    formats = {name: form for name in names if form is not PLAIN and form.parameters.search(name)}
    step = tiny.build_step(config, 3, max_batch=40, dtype=torch.bfloat16, formats=formats)
    shapes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        products = [node for node in graph.graph.nodes if "_partials" in str(node.target)]
        shapes.extend(node.meta["example_value"].shape for node in products)

        def run(*args: Any) -> Any:
            raise Traced

        return run

    sizes = [torch.zeros(size, dtype=torch.int32) for size in (2, 4, 5, 17, 40)]
    mark_sizes(sizes)
    torch._dynamo.reset()
    program = torch.compile(step.decode, fullgraph=True, dynamic=False, backend=backend)
    for size in reversed(sizes):
        with torch.no_grad(), pytest.raises(Traced):
            program(size, RoundShape(3, 3))
    # A layer has one product before each norm, but a mixture's sum is none.
    assert len(shapes) == (1 if is_mixture else 2) * (2 + 3)
    # Codes have one number of partials for all rows.
    if not form.group:
        assert all(not isinstance(shape[0], int) and len(shape) == 2 for shape in shapes)


def test_each_number_of_rows_has_its_number_of_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_mtp.models.linear.count_partials", one_four_or_two)
    step = tiny.build_step(tiny.tiny_config(), 3, max_batch=2, dtype=torch.bfloat16)
    product = next(m for m in step.modules() if isinstance(m, Linear) and m.is_before_norm)
    counts = [product._count_of(torch.empty(rows, 1)) for rows in (1, 16, 17, 128, 129, 1024)]
    assert counts == [1, 1, 4, 4, 2, 2]


def test_the_garbage_collectors_settings_do_not_change() -> None:
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
