"""The process that compiles the programs of further depths: from shapes alone, without weights or caches.

Its tensors are fake: they have shapes, strides and dtypes and no memory. What is compiled takes the engine's
own when it is called.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_mtp.build import lay_out
from compiled_mtp.build_order import Order
from compiled_mtp.graphs.compile import compiler_settings
from compiled_mtp.graphs.maker import end_with_parent


def main() -> None:
    """Carry out the pickled `Order` on stdin in the folder argv[1]; see `ProgramMaker`."""
    # What a compiler prints is no name of ours.
    names = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order, folder = pickle.load(sys.stdin.buffer), Path(sys.argv[1])
    end_with_parent(folder)
    for name in make(order, folder):
        names.write(f"{name}\n")
        names.flush()


def make(order: Order, folder: Path) -> Iterator[str]:
    """Write what `order` names into `folder`; yields the name of each program once its file is whole."""
    # Nothing starts processes of its own to be quicker.
    alone = torch._inductor.config.patch(compile_threads=1)
    with FakeTensorMode(), torch.no_grad(), compiler_settings(), alone:
        programs = lay_out(order)
        _part_views(programs.step)
        torch.set_num_threads(order.num_threads)
        for shape in programs.shapes_of(order.depths):
            if not (folder / shape.name).exists():
                programs.save_shape(shape, folder)
            yield shape.name


def _part_views(step: nn.Module) -> None:
    """Give every buffer that is a view, of what all layers share, memory of its own, which is none: the
    compiler takes no view of a fake tensor, and what it makes knows shapes and strides alone.
    """
    for module in step.modules():
        for name, tensor in module.named_buffers(recurse=False):
            if tensor._is_view():
                own = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
                setattr(module, name, own)
