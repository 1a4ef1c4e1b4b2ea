"""Reads a specification's annotations, and generates the functions that check, fake and bind its arguments.

`q: Annotated[Tensor, "rows Hk Dk", F32]` is a tensor of three dimensions. The first use of a name sets its
size; every other dimension must equal its name, number or expression. An expression is written without blanks
("Hv*Dv"), from dimensions and the operator's numbers. "slots|0" allows either size, "_" any size, and "..."
in front any further dimensions. Without a shape the rank is free. Further notes, in any order: a dtype or a
tuple of dtypes, `Like("q")` for the dtype of another argument, CONTIGUOUS (without it the last dimension has
stride 1 and the others are free), and `Remedy(...)`, which ends the errors. A NamedTuple of such tensors is a
record: one argument of the specification, and one argument per field in torch.
"""

from __future__ import annotations

import inspect
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

from compiled_mtp.ops.checks import wrong_dtype, wrong_layout, wrong_shape

F32, FP8 = torch.float32, torch.float8_e4m3fn
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
ACTIVATION = (torch.float32, torch.bfloat16)
CONTIGUOUS = object()
SCALARS = {int: "SymInt", float: "float", bool: "bool", str: "str"}


@dataclass(frozen=True)
class Like:
    """A note that a tensor has the dtype of another argument."""

    argument: str


@dataclass(frozen=True)
class Remedy:
    """A note of what to do about a tensor that does not fit."""

    text: str


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument or result of torch's flat schema."""

    name: str
    dims: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...] | Like | None
    is_contiguous: bool
    is_optional: bool
    remedy: str


@dataclass(frozen=True)
class Number:
    """An argument that is not a tensor, and its type in the schema."""

    name: str
    kind: str


def read_hint(name: str, hint: Any) -> TensorArgument | Number:
    """Return what one annotation says; raise TypeError for an annotation of another kind."""
    is_optional = get_origin(hint) in (Union, UnionType)
    if is_optional:
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if hint in SCALARS:
        return Number(name, SCALARS[hint])
    if get_origin(hint) is not Annotated or get_args(hint)[0] is not torch.Tensor:
        raise TypeError(f"{name} must be an Annotated[Tensor, ...], a record of them or a number, got {hint}")
    notes = get_args(hint)[1:]
    dims = next((tuple(note.split()) for note in notes if isinstance(note, str)), None)
    dtypes = next((note for note in notes if isinstance(note, (torch.dtype, tuple, Like))), None)
    remedy = next((note.text for note in notes if isinstance(note, Remedy)), "compare its docstring")
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,)
    return TensorArgument(name, dims, dtypes, CONTIGUOUS in notes, is_optional, remedy)


def is_record(hint: Any) -> bool:
    """Return whether an annotation is a NamedTuple."""
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def read_fields(record: Any) -> list[TensorArgument | Number]:
    """Return what the annotations of a NamedTuple's fields say."""
    hints = get_type_hints(record, include_extras=True)
    return [read_hint(name, hints[name]) for name in record._fields]


def make_record(name: str, fields: list[str], defaults: list[Any]) -> Any:
    """Return a NamedTuple class for arguments."""
    return namedtuple(name, fields, defaults=defaults)


class Signature:
    """A specification's arguments and results: with records, as it takes them, and flat, as torch does.

    `bound` is the NamedTuple class of the arguments that a kernel's `launch` takes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.parameters = list(inspect.signature(function).parameters.values())
        hints = get_type_hints(function, include_extras=True)
        returned = hints.pop("return")
        self.records = {name: hint for name, hint in hints.items() if is_record(hint)}
        self.arguments: list[TensorArgument | Number] = []
        for name, hint in hints.items():
            self.arguments += read_fields(hint) if name in self.records else [read_hint(name, hint)]
        self.result_type = returned if is_record(returned) else None
        if is_record(returned):
            self.results = read_fields(returned)
        else:
            parts = get_args(returned) if get_origin(returned) is tuple else (returned,)
            self.results = [read_hint("result", part) for part in parts]
        self.is_tuple = self.result_type is not None or get_origin(returned) is tuple
        names = {name for tensor in self.tensors for name in tensor.dims or ()}
        assert not names & {tensor.name for tensor in self.tensors}, "a dimension has a tensor's name"
        defaults = [p.default for p in self.parameters if p.default is not p.empty]
        self.bound = make_record(self.name, [p.name for p in self.parameters], defaults)

    @property
    def tensors(self) -> list[TensorArgument]:
        """Return the arguments that are tensors, in the order of the schema."""
        return [argument for argument in self.arguments if isinstance(argument, TensorArgument)]

    def schema(self, mutates: tuple[str, ...]) -> str:
        """Return torch's text form of the schema: torch.library.infer_schema cannot read the annotations."""
        unknown = set(mutates) - {argument.name for argument in self.tensors}
        if unknown:
            raise TypeError(f"mutates must name tensors of {self.name}, got {sorted(unknown)}; correct it")
        parts = []
        for argument in self.arguments:
            if isinstance(argument, Number):
                parts.append(f"{argument.kind} {argument.name}")
                continue
            alias = f"(a{len(parts)}!)" if argument.name in mutates else ""
            parts.append(f"Tensor{alias}{'?' if argument.is_optional else ''} {argument.name}")
        results = ", ".join("Tensor" for _ in self.results)
        return f"{self.name}({', '.join(parts)}) -> {f'({results})' if self.is_tuple else results}"

    def functions(
        self,
        overload: Any,
        on_cpu: Callable[[], Callable[..., Any]],
        check: Callable[..., None] | None,
        fake: Callable[..., Any] | None,
    ) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Return the function for users, the fake, and one that makes `bound` from torch's flat arguments.

        With a plain CPU tensor, outside tracing and dispatch modes, the first calls what `on_cpu` returns
        directly: torch's dispatcher would add 5 to 10 us per call.

        The functions are generated as source and compiled, as `dataclasses` does: a call is as fast as
        handwritten checks, and has the specification's own signature.
        """
        flat = ", ".join(argument.name for argument in self.arguments)
        given = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in self.parameters
        )
        nested = ", ".join(
            f"{p.name}_type({', '.join(self.records[p.name]._fields)})" if p.name in self.records else p.name
            for p in self.parameters
        )
        arguments, first = ", ".join(p.name for p in self.parameters), self.tensors[0].name
        unpacking = [f"{', '.join(record._fields)}, = {name}" for name, record in self.records.items()]
        called = f"overload({flat})" if self.result_type is None else f"result_type(*overload({flat}))"
        lines = [
            f"def check({flat}):",
            *indented(self.check_lines(check) or ["pass"]),
            f"def fake({flat}):",
            *indented([*self.check_lines(check), f"return {self.fake_expression(fake)}"]),
            f"def nest({flat}):",
            f"    return bound({nested})",
            f"def {self.name}({given}):",
            *indented([*unpacking, "if not is_compiling():", f"    check({flat})"]),
            f"        if type({first}) in plain and {first}.is_cpu and not modes():",
            f"            return on_cpu()({arguments})",
            f"    return {called}",
            f"return {self.name}, fake, nest",
        ]
        values = {
            "overload": overload, "rules": check, "make_fake": fake, "bound": self.bound,
            "result_type": self.result_type, "wrong_shape": wrong_shape, "wrong_dtype": wrong_dtype,
            "wrong_layout": wrong_layout, "is_compiling": torch.compiler.is_compiling, "empty": torch.empty,
            "on_cpu": on_cpu, "plain": (torch.Tensor, torch.nn.Parameter),
            "modes": torch._C._len_torch_dispatch_stack,
            **{f"{name}_type": record for name, record in self.records.items()},
            **dict(self.dtype_names()),
        }  # fmt: skip
        # The values are closure variables: with globals, a compiler would guard and save a namespace of ours.
        source = "\n".join([f"def make({', '.join(values)}):", *indented(lines)])
        code: CodeType = compile(source, f"<operator {self.name}>", "exec")
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(code, namespace)
        made: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]] = namespace["make"](**values)
        return made

    def dtype_names(self) -> Iterator[tuple[str, Any]]:
        """Yield the dtypes that the generated functions name."""
        for place, tensor in enumerate([*self.arguments, *self.results]):
            if isinstance(tensor, TensorArgument) and isinstance(tensor.dtypes, tuple):
                yield f"dtypes_{place}", tensor.dtypes

    def check_lines(self, check: Callable[..., None] | None) -> list[str]:
        """Return statements that bind the dimensions' names and raise ValueError unless all arguments fit."""
        lines: list[str] = []
        sizes = [number.name for number in self.arguments if isinstance(number, Number)]
        waiting = {
            tensor: f"dtypes_{place}"
            for place, tensor in enumerate(self.arguments)
            if isinstance(tensor, TensorArgument)
        }
        while waiting:
            # A tensor with expressions waits until their dimensions are bound, in any order of arguments.
            tensor = next((t for t in waiting if needed_sizes(t) <= {*sizes, *(t.dims or ())}), None)
            assert tensor is not None, f"{self.name}: expressions of unknown dimensions in {list(waiting)}"
            tests = tensor_tests(tensor, waiting.pop(tensor), sizes)
            if tensor.is_optional:
                tests = [f"if {tensor.name} is not None:", *indented(tests)]
            lines += tests
        if check is not None:
            lines.append(f"rules({', '.join(inspect.signature(check).parameters)})")
        return lines

    def fake_expression(self, fake: Callable[..., Any] | None) -> str:
        """Return an expression that allocates the results, in terms of names that `check_lines` binds."""
        if fake is not None:
            return f"make_fake({', '.join(inspect.signature(fake).parameters)})"
        device = f"{self.tensors[0].name}.device"
        parts = []
        for place, tensor in enumerate(self.results, len(self.arguments)):
            assert isinstance(tensor, TensorArgument)
            assert tensor.dims is not None, f"{self.name}: a result without a shape needs fake="
            like = isinstance(tensor.dtypes, Like)
            dtype = f"{tensor.dtypes.argument}.dtype" if like else f"dtypes_{place}[0]"  # type: ignore[union-attr]
            parts.append(f"empty(({''.join(d + ', ' for d in tensor.dims)}), dtype={dtype}, device={device})")
        return f"({', '.join(parts)},)" if self.is_tuple else parts[0]


def needed_sizes(tensor: TensorArgument) -> set[str]:
    """Return the names of dimensions that a tensor's expressions need."""
    expressions = " ".join(dim for dim in tensor.dims or () if not dim.isidentifier())
    return set(re.findall(r"[A-Za-z_]\w*", expressions))


def indented(lines: list[str]) -> list[str]:
    """Return the lines indented by one level."""
    return [f"    {line}" for line in lines]


def tensor_tests(tensor: TensorArgument, dtypes: str, sizes: list[str]) -> list[str]:
    """Return statements that check one tensor; `sizes` holds the bound names and gains those bound here."""
    name, lines = tensor.name, []
    if tensor.dims is not None:
        wrong = f"raise wrong_shape({name!r}, {name}, {tensor.dims!r}, locals(), {tensor.remedy!r})"
        is_open = tensor.dims[0] == "..."
        rank = f"< {len(tensor.dims) - 1}" if is_open else f"!= {len(tensor.dims)}"
        lines += [f"shape = {name}.shape", f"if len(shape) {rank}: {wrong}"]
        unequal = []
        for place, dim in enumerate(tensor.dims, -len(tensor.dims) if is_open else 0):
            if dim in ("_", "..."):
                continue
            if dim.isidentifier() and dim not in sizes:
                lines.append(f"{dim} = shape[{place}]")
                sizes.append(dim)
            else:
                choices = dim.split("|")
                unequal.append("(" + " and ".join(f"shape[{place}] != {c}" for c in choices) + ")")
        if unequal:
            lines.append(f"if {' or '.join(unequal)}: {wrong}")
    if isinstance(tensor.dtypes, Like):
        other = f"{tensor.dtypes.argument}.dtype"
        lines.append(f"if {name}.dtype is not {other}: raise wrong_dtype({name!r}, {name}, ({other},))")
    elif tensor.dtypes is not None:
        lines.append(f"if {name}.dtype not in {dtypes}: raise wrong_dtype({name!r}, {name}, {dtypes})")
    # Test the stride first: `is_contiguous` would ask whether a size that a program leaves open is 1.
    is_row = f"{name}.stride(-1) == 1 or {name}.shape[-1] <= 1"
    fits = f"{name}.is_contiguous()" if tensor.is_contiguous else f"{is_row} or {name}.is_contiguous()"
    lines.append(f"if not ({fits}): raise wrong_layout({name!r}, {name}, {tensor.is_contiguous})")
    return lines
