"""What a launch needs to know of its device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# What one program may use; 99 KiB on the capabilities not named (CUDA C++ Programming Guide, table 'Technical
# Specifications per Compute Capability').
SHARED_BYTES = {
    (8, 0): 163 * 1024,
    (8, 7): 163 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
}


@dataclass(frozen=True)
class Device:
    """Architecture ("sm_90"), shared memory a program may use in bytes, and dependent launches.

    A kernel launched with `launch_pdl` may start while the kernel before it still runs. Each of its programs
    must execute `gdc_wait()` on every path, because the end of a kernel stands for the end of all before it.
    Before that it may read parameters, which no kernel writes. It touches what another kernel writes or reads
    only after it, with the exceptions below.

    A fence is a kernel launched without `launch_pdl`, or one whose programs wait before they execute
    `gdc_launch_dependents()`: linear and the gated norm. What is launched after a fence starts once
    everything before the fence is complete (not the fence itself). So a kernel may read before it waits what
    is older than the last fence before it (tests/test_fences.py checks the order of a whole step):

    - spec_conv1d reads conv_ring and the cursors, gdn_verify reads and stores states and records as well:
      in_proj, a linear, is launched right before spec_conv1d and writes none of them, and all that does write
      them, the same layer's calls of the step before, a prefill, a commit or the step's end, lies before
      in_proj, whatever the layer. It does not hold for z, which in_proj writes: only spec_conv1d lies between
      it and gdn_verify, and that is no fence.
    - qk_norm_rope_kv_write reads positions and slots, paged_attention positions: the projection, a linear, is
      launched after what made them. It does not hold for keys and gates.
    - add_rms_norm reads the residual, and which rows to keep: the layer's products lie between.
    - sample reads the cursors and parameters of its slots: the head, a linear, lies between. accept_window
      reads the window and its places, older still.
    """

    arch: str
    shared_bytes: int
    has_dependent_launch: bool


@functools.cache
def device_of(index: int | None) -> Device:
    """The CUDA device of that index; without CUDA, for the interpreter, a Hopper without such launches."""
    if index is None or not torch.cuda.is_available():
        return Device("sm_90", 227 * 1024, False)
    major, minor = torch.cuda.get_device_capability(index)
    return Device(f"sm_{major}{minor}", SHARED_BYTES.get((major, minor), 99 * 1024), major >= 9)
