"""`compiled-mtp quantize`: make an FP8 checkpoint, in blocks of 128 by 128 as released, from a bfloat16 one.

    compiled-mtp quantize CHECKPOINT --output DIRECTORY [--lora ADAPTER]

Projections of attention, of GDN (except its gates b and a), of FFNs and of experts become float8_e4m3fn with
a factor (`weight_scale_inv`: block maximum / 448) for each block; stacked experts become one tensor each, as
in the releases. Embedding, head, norms, convolutions, routers, `mtp.fc`, and matrices whose rows or columns
are not a multiple of 128 stay as they are and are listed in `modules_to_not_convert`. Files are read and
written one at a time; tokenizer and templates are copied. Prints one JSON line: how many matrices were
converted and kept, the bytes before and after, and the relative error of the converted weights.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import check, fail
from compiled_mtp.frontend.hub import find_checkpoint
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.headers import Header
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.lora import read_merged
from compiled_mtp.models.lora_weights import MergedWeight
from compiled_mtp.models.weight_format import FP8
from compiled_mtp.terminal.console import EXIT_OK, check_stdout, run_command, write_text
from compiled_mtp.terminal.flags import Parser

# The largest e4m3 value.
LARGEST = 448.0
# The weights that the FP8 releases quantise.
CONVERTED = re.compile(
    r"\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)\.weight$"
)
STACKED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
# Files that are copied; of these, the index and config.json are then written anew.
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
INDEX = "model.safetensors.index.json"


def quantize_blocks(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values [N, K] and factors [N / 128, K / 128] of weight [N, K].

    N and K are multiples of 128. A factor is its block's largest magnitude over 448, rounded to scale_dtype.
    """
    n, k = (size // FP8.block for size in weight.shape)
    blocks = weight.float().view(n, FP8.block, k, FP8.block)
    scale = (blocks.abs().amax((1, 3)).clamp(min=1e-10) / LARGEST).to(scale_dtype)
    # If its factor was rounded down, a block has values above the largest.
    values = (blocks / scale.float()[:, None, :, None]).clamp(-LARGEST, LARGEST)
    return values.view(weight.shape).to(torch.float8_e4m3fn), scale


@dataclass
class Counts:
    """The figures of the printed line; `error` and `size` (of the weights) are sums of squares."""

    converted: int = 0
    kept: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    error: float = 0.0
    size: float = 0.0


def convert(
    name: str, tensor: torch.Tensor, scale_dtype: torch.dtype, counts: Counts
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) pairs to store for one tensor of the checkpoint; adds its figures to `counts`."""
    if STACKED.search(name):
        base = name.rpartition(".")[0]
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, weight in parts.items():
                yield from convert(f"{base}.{expert}.{part}.weight", weight, scale_dtype, counts)
        return
    if not CONVERTED.search(name) or any(size % FP8.block for size in tensor.shape):
        if name.endswith(".weight"):
            counts.kept.append(name.removesuffix(".weight"))
        # Cloned, since a matrix of a stack is a view of the whole stack.
        yield name, tensor.clone()
        return
    is_finite = bool(tensor.isfinite().all())
    # One NaN or infinity would spoil its whole block.
    check(is_finite, name, "be finite to be quantised", "NaN or infinity", "check the checkpoint's files")
    values, scale = quantize_blocks(tensor, scale_dtype)
    exact = tensor.double()
    counts.converted += 1
    counts.error += float((FP8.dequantize(values, scale.float(), torch.float32) - exact).square().sum())
    counts.size += float(exact.square().sum())
    yield name, values
    yield name + FP8.scale_suffix, scale


def quantize_checkpoint(
    source: Path, out: Path, scale_dtype: torch.dtype = torch.bfloat16, lora: Path | None = None
) -> Counts:
    """Write the checkpoint in `source`, quantised, to the new directory `out`; return the figures.

    lora: the directory of an adapter, which is merged into the weights first.

    Raises ValueError for a checkpoint that the engine does not read, that is quantised already or in which a
    matrix to convert is not finite, and for an `out` that exists or has no room.
    """
    is_folder = source.suffix != ".gguf"
    remedy = "give the checkpoint from which the file was converted"
    check(is_folder, "checkpoint", "be a directory of safetensors files", str(source), remedy)
    config, counts = read_model_config(source), Counts()
    # Not by config.json alone: the files may hold quantised weights that it does not mention.
    is_plain = not config.quantized and all(
        isinstance(weight, Header) and weight.dtype != FP8.header_dtype
        for weight in read_stored(source).values()
    )
    check(is_plain, "checkpoint", "be in bfloat16", str(source), "give the checkpoint before quantisation")
    # A dangling link counts as existing too.
    is_new = not (out.exists() or out.is_symlink())
    check(is_new, "output", "be a new directory", str(out), "name another or remove it")
    weights = read_merged(config, source, lora).values()
    merged = {weight.name: weight for weight in weights if isinstance(weight, MergedWeight)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as enclosing:
        made = Path(enclosing) / "made"
        made.mkdir()
        weight_map: dict[str, str] = {}
        for file in sorted(source.glob("*.safetensors")):
            stored: dict[str, torch.Tensor] = {}
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  no mapping
                    tensor = tensors.get_tensor(name)
                    if name in merged:
                        whole = tuple(slice(0, size) for size in tensor.shape)
                        tensor = merged[name].read(whole).to(tensor.dtype)
                    counts.bytes_before += tensor.nbytes
                    stored |= dict(convert(name, tensor, scale_dtype, counts))
            counts.bytes_after += sum(tensor.nbytes for tensor in stored.values())
            weight_map |= dict.fromkeys(stored, file.name)
            _save(stored, made / file.name, out)
        for path in (path for pattern in COPIED for path in source.glob(pattern)):
            shutil.copyfile(path, made / path.name)
        if (source / INDEX).exists():
            index = {"metadata": {"total_size": counts.bytes_after}, "weight_map": weight_map}
            (made / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (made / "config.json").write_text(json.dumps(quantized_config(source, counts.kept), indent=2) + "\n")
        made.rename(out)
    return counts


def _save(stored: dict[str, torch.Tensor], file: Path, out: Path) -> None:
    """Write `stored` to `file` with a new file's default permissions: safetensors lets only the owner read.

    Raises ValueError, which names `out`, if the disk is full.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(stored, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors reports the disk's errors so.
        raise fail(
            "output", "have room for the weights", f"{out} ({error})", "free some or name another"
        ) from None
    file.chmod(mode)


def quantized_config(source: Path, kept: list[str]) -> dict[str, Any]:
    """Return the config.json of `source` with the fields that the FP8 releases add."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # A tied head has no tensor, but readers look for its name.
    names = dict.fromkeys([*(["lm_head"] if "lm_head" not in kept else []), *sorted(kept)])
    return config | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8.block, FP8.block],
            "modules_to_not_convert": list(names),
        }
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 for an error, 130 for Ctrl-C or 143 for SIGTERM."""
    return run_command(lambda _: _quantize(make_parser().parse_args(argv)))


def make_parser() -> Parser:
    """Return the flags."""
    parser = Parser(
        prog="compiled-mtp quantize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described = "a bfloat16 checkpoint: a directory, or a repository of the Hub such as Qwen/Qwen3.5-4B"
    parser.add_argument("checkpoint", help=described)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIRECTORY", help="the directory to create"
    )
    described = "a directory with a LoRA adapter, which is merged into the weights before they are quantised"
    parser.add_argument("--lora", type=Path, metavar="DIRECTORY", help=described)
    parser.add_argument(
        "--scale-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the factors: bfloat16 as in Qwen3.5's releases, float32 as in Qwen3-Next's",
    )
    return parser


def _quantize(flags: argparse.Namespace) -> int:
    stdout = check_stdout()
    # safetensors writes tensors through numpy; nothing else in this package needs numpy.
    has_numpy = find_spec("numpy") is not None
    check(has_numpy, "numpy", "be installed to write a checkpoint", "none", "pip install numpy")
    config = EngineConfig(model=flags.checkpoint, lora=flags.lora)
    source = find_checkpoint(config.model, is_offline=config.offline)
    counts = quantize_checkpoint(source, flags.output, getattr(torch, flags.scale_dtype), config.lora)
    relative = (counts.error / counts.size) ** 0.5 if counts.size else 0.0
    told = {
        "output": str(flags.output),
        "converted": counts.converted,
        "kept": len(counts.kept),
        "bytes_before": counts.bytes_before,
        "bytes_after": counts.bytes_after,
        "error": relative,
    }
    write_text(stdout, json.dumps(told) + "\n")
    return EXIT_OK
