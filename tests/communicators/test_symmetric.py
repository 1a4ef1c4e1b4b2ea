"""Communicators of GPUs: two processes run the kernels in Triton's interpreter; one test compiles them."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.communicators.communicator import CommunicatorError
from compiled_mtp.ops.k_splits import add_tree
from tests.communicators.threads import thread_communicators

pytest.importorskip("triton", reason="Triton exists on Linux only")

ROOT = Path(__file__).resolve().parents[2]
CHANNELS, CHUNK = 4, 16
FIXED = {"CHANNELS": CHANNELS, "CHUNK": CHUNK, "PDL": False}
# Fewer programs after more, so that channels differ in their epochs, and a last program that is not full.
SIZES = (40, 16, 64, 5, 50)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, with plain stores and loads as signals: the interpreter keeps their order."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a CUDA device is present, tests/gpu runs the kernels on it")
    import triton
    import triton.language as tl

    from compiled_mtp.communicators import symmetric_kernel

    tick = iter(range(1 << 62))

    def send(at, epoch):  # type: ignore[no-untyped-def]
        tl.store(at, epoch)

    def read(at):  # type: ignore[no-untyped-def]
        return tl.load(at)

    for name, function in (("send_signal", send), ("read_signal", read)):
        function.__globals__["tl"] = tl
        monkeypatch.setattr(symmetric_kernel, name, triton.jit(function))
    monkeypatch.setattr(symmetric_kernel, "globaltimer", lambda: next(tick))
    return symmetric_kernel


def memories(world: int) -> list[torch.Tensor]:
    words = CHANNELS * world * (1 + 3 * CHUNK)
    return [torch.zeros(words, dtype=torch.int32).share_memory_() for _ in range(world)]


def run_rank(kernels: Any, rank: int, memory: list[torch.Tensor], seen: Any) -> None:
    """Run gathers and sums of all sizes alternately; pass whether each result is right to `seen`."""
    world = len(memory)
    shared = (
        torch.tensor([each.data_ptr() for each in memory]),
        torch.zeros(CHANNELS, dtype=torch.int32),
        torch.tensor([0, 1 << 60]),
    )
    fixed = FIXED | {"RANK": rank, "WORLD": world, "TURNS": 1 << 30}
    for size in SIZES:
        words = [torch.arange(size, dtype=torch.int32) * (peer + 1) + size for peer in range(world)]
        out = torch.full((world, size), -1, dtype=torch.int32)
        grid = (-(-size // CHUNK),)
        kernels.gather_kernel[grid](words[rank], out, *shared, size, 0, size, **fixed, PARTIALS=1)
        seen(out.equal(torch.stack(words)))
        for count in (1, 2, 4):
            parts = parts_of(world, count, size)
            gathered = torch.full((world, size), float("nan"))
            kernels.gather_kernel[grid](
                parts[rank], gathered, *shared, size, size, size, **fixed, PARTIALS=count
            )
            seen(gathered.equal(torch.stack([add_tree(each) for each in parts])))
        size *= world
        for count in (1, 2):
            parts = parts_of(world, count, size)
            sums = torch.full((size,), float("nan"), dtype=torch.bfloat16)
            grid = (-(-size // (CHUNK * world)),)
            kernels.sum_kernel[grid](parts[rank], sums, *shared, size, size, **fixed, PARTIALS=count)
            # The norm's tree of all partials: the number per rank changes no bit.
            seen(sums.equal(add_tree(torch.cat(parts)).bfloat16()))


def parts_of(world: int, count: int, size: int) -> list[torch.Tensor]:
    """Return the partials of each rank, [count, size]."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, size, generator=generator) for _ in range(world)]


def test_ranks_meet_in_every_channel(kernels: Any) -> None:
    memory, fork = memories(2), multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    other = fork.Process(target=run_rank, args=(kernels, 1, memory, results.put), daemon=True)
    other.start()
    own: list[bool] = []
    run_rank(kernels, 0, memory, own.append)
    other.join(60)
    assert own == [results.get() for _ in own] == [True] * (6 * len(SIZES))


@pytest.mark.parametrize("aborted", [0, -1])
def test_a_rank_that_never_comes_is_noted(kernels: Any, aborted: int) -> None:
    """The kernel and all later ones end at the limit, or as soon as the host aborts."""
    memory, control = memories(2), torch.tensor([aborted, 40 if not aborted else 1 << 60])
    peers = torch.tensor([each.data_ptr() for each in memory])
    epochs, x = torch.zeros(CHANNELS, dtype=torch.int32), torch.ones(40, dtype=torch.int32)
    fixed = FIXED | {"RANK": 0, "WORLD": 2, "TURNS": 4, "PARTIALS": 1}
    for _ in range(2):
        kernels.gather_kernel[(3,)](x, x.new_zeros(80), peers, epochs, control, 40, 0, 40, **fixed)
        assert control[0] == (aborted or 2)


def test_hosts_gather_by_gloo_and_read_what_kernels_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compiled_mtp.communicators import symmetric

    stores: list[Any] = []

    class Memory:
        """Symmetric memory of one rank, on the host."""

        def set_group_info(self, *group: Any) -> None:
            self.group = group

        def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
            self.tensor = torch.ones(size, dtype=dtype)
            return self.tensor

        def rendezvous(self, tensor: torch.Tensor, name: str) -> Memory:
            assert name == self.group[0]
            # The memory has no old signals when the other ranks get access.
            assert not tensor.any()
            from torch._C._distributed_c10d import _resolve_process_group

            # The store that torch 2.11 uses, and the store that other versions use.
            stores.extend([_resolve_process_group(name).get_group_store(), self.group[3]])
            return self

        def get_buffer(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return self.tensor

    monkeypatch.setattr(symmetric, "_SymmetricMemory", Memory())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    communicator = symmetric.SymmetricCommunicator(0, 1, tmp_path, torch.device("cpu"))
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert [type(store) for store in stores] == [symmetric.RenumberedStore] * 2
    assert communicator._peers.tolist() == [communicator._memory.data_ptr()]
    assert communicator.least(5) == 5
    assert communicator._control.tolist() == [0, 600_000_000_000]
    # Also without compilation: on GPUs ranks have captured all that they launch.
    communicator.expect_steps()
    # A kernel waits for a paused rank 0, until rank 0 asks which rank is missing.
    assert communicator._control[1] > 10**16
    communicator.name_missing()
    assert communicator._control.tolist() == [0, 0]
    communicator.check()
    assert [communicator.adds(rows) for rows in (63, 64)] == [False, True]
    communicator.abort()
    with pytest.raises(CommunicatorError, match="the communicator was aborted"):
        communicator.check()
    # The fault as a kernel sets it; a later abort does not change it.
    communicator._control[0] = 2
    communicator.abort()
    with pytest.raises(CommunicatorError, match="rank 1 did not enter a collective within 7 s"):
        communicator.check()

    def fail(device: torch.device) -> None:
        raise RuntimeError("the device failed")

    # Kernels of a failed device may still read the memory; on other devices all kernels have ended.
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    communicator.release()
    assert communicator in symmetric._ABORTED
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    communicator.release()
    assert communicator not in symmetric._ABORTED


def test_a_later_engine_of_rank_0_meets_new_ranks(tmp_path: Path) -> None:
    """torch counts rendezvous per process, and rank 0's process may have had some before."""
    from torch._C._distributed_c10d import FileStore, PrefixStore

    from compiled_mtp.communicators.symmetric import RenumberedStore

    file = str(tmp_path / "store")
    RenumberedStore(FileStore(file, 2)).set("other", "as it is")
    assert FileStore(file, 2).get("other") == b"as it is"
    ranks = [RenumberedStore(FileStore(file, 2)) for _ in range(2)]
    for communicator in range(2):
        for rank, (store, first) in enumerate(zip(ranks, (7, 0), strict=True)):
            # torch calls the store from C++.
            PrefixStore(f"CUDASymmetricMemory/{first + communicator}", store).set(
                str(rank), bytes([rank, 255, 0])
            )
        for store, first in zip(ranks, (7, 0), strict=True):
            keys = [f"CUDASymmetricMemory/{first + communicator}/{rank}" for rank in range(2)]
            assert store.multi_get(keys) == [bytes([rank, 255, 0]) for rank in range(2)]
        for store, first in zip(ranks, (7, 0), strict=True):
            assert store.add(f"CUDASymmetricMemory/{first + communicator}/came", 1) == 1 + (store is ranks[1])
            store.wait([f"CUDASymmetricMemory/{first + communicator}/{rank}" for rank in range(2)])
    # Each prefix has its own numbers.
    ranks[0].set("validate/group/0/0", "as it is")
    assert FileStore(file, 2).get("validate/group/0/0") == b"as it is"


class OnGpu:
    """A CPU tensor whose `is_cuda` is True."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def test_nccl_gathers_on_the_steps_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns no work to wait for on the stream; CPU tensors go by gloo."""
    from compiled_mtp.communicators.nccl import NcclCommunicator

    class Group:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
            self.aborted, self.options = [threading.Event(), threading.Event()], options
            self.ends = threading.Event()

        def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> None:
            assert not options.asyncOp
            out.copy_(x)

        def abort(self) -> None:
            next(event for event in self.aborted if not event.is_set()).set()
            # NCCL waits until no graph is left.
            self.ends.wait(20)

    monkeypatch.setattr("torch._C._distributed_c10d.ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    communicator = NcclCommunicator(0, 1, tmp_path)
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    x: Any = OnGpu(torch.arange(6).view(2, 3))
    assert communicator._gather(x).equal(x.tensor[None])
    assert communicator.least(5) == 5
    group: Any = communicator._device_group
    # `abort` does not wait, and aborts NCCL once.
    communicator.abort()
    communicator.abort()
    assert group.aborted[0].wait(20)
    group.ends.set()
    assert not group.aborted[1].is_set()


CODE = """
import json, sys
sys.path.insert(0, "tools")
import torch
from record_launches import record
from compiled_mtp.communicators.symmetric_kernel import gather_kernel, sum_kernel

def launch(kernel, dtype, parts, device):
    x = torch.empty(parts, 20480, dtype=dtype, device=device)
    out, strides = torch.empty(2, 20480, dtype=dtype, device=device), (20480,)
    if kernel is sum_kernel:
        out, strides = torch.empty(20480, dtype=torch.bfloat16, device=device), ()
    peers, epochs, control = (
        torch.empty(1024, dtype=t, device=device) for t in (torch.int64, torch.int32, torch.int64)
    )
    kernel[(20,)](
        x, out, peers, epochs, control, 20480, 20480, *strides, PARTIALS=parts, RANK=1, WORLD=2,
        CHANNELS=1024, CHUNK=1024, TURNS=4096, PDL=True, num_warps=4, launch_pdl=True,
    )

ptx = []
for kernel, dtype, parts in (
    (gather_kernel, torch.int32, 1), (gather_kernel, torch.float32, 4), (sum_kernel, torch.float32, 4)
):
    (made,) = record(lambda device: launch(kernel, dtype, parts, device), 90)
    ptx.append(made.compile().asm["ptx"])
print(json.dumps(ptx))
"""


def test_the_compiler_keeps_the_order_of_signals() -> None:
    """For sm_90: no memory access comes before the wait; a barrier separates a signal from the stores before
    it; signals have release and acquire semantics for the whole system."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    for ptx, barriers in zip(json.loads(done.stdout.splitlines()[-1]), (1, 1, 2), strict=True):
        lines = [line.strip() for line in ptx.splitlines()]

        def places(what: str, lines: list[str] = lines) -> list[int]:
            return [number for number, line in enumerate(lines) if what in line and not line.startswith("//")]

        assert ".local" not in ptx
        memory = places("ld.global") + places("st.global") + places("ld.acquire") + places("st.release")
        assert places("griddepcontrol.wait")[0] < min(memory)
        signals = places("st.release.sys.global.b32")
        assert len(signals) == barriers
        wide = places("st.global.v4.b32")
        for signal in signals:
            before = [store for store in wide if store < signal]
            assert any(max(before) < sync < signal for sync in places("bar.sync"))
            assert any(look > signal for look in places("ld.acquire.sys.global.b32"))


def test_many_rows_are_summed_by_the_communicator() -> None:
    """The sums equal those that the norm makes of the partials."""
    communicator = thread_communicators(1)[0]
    parts = torch.randn(4, 64, 8)
    sums = add_tree(parts)[None]
    assert communicator.gather_partials(parts, torch.bfloat16).equal(sums)
    communicator.adds = lambda rows: rows >= 64  # type: ignore[method-assign]
    assert communicator.gather_partials(parts, torch.bfloat16).equal(sums.bfloat16())
    assert communicator.gather_partials(parts[:, :63], torch.bfloat16).equal(sums[:, :63])
