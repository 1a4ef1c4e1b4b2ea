"""What a process has told torch that decides bits: ranks take rank 0's, replicas compare theirs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch.backends import cuda

# From the widest to the narrowest: a setting of the first is inherited where the others have none.
_PRECISIONS = {
    "fp32_precision": ("generic", "all"),
    "mkldnn_fp32_precision": ("mkldnn", "all"),
    "mkldnn_matmul_fp32_precision": ("mkldnn", "matmul"),
    "mkldnn_conv_fp32_precision": ("mkldnn", "conv"),
    "mkldnn_rnn_fp32_precision": ("mkldnn", "rnn"),
    "cuda_fp32_precision": ("cuda", "all"),
    "cuda_matmul_fp32_precision": ("cuda", "matmul"),
    "cudnn_conv_fp32_precision": ("cuda", "conv"),
    "cudnn_rnn_fp32_precision": ("cuda", "rnn"),
}


@dataclass(frozen=True)
class NumericSettings:
    """torch's process-wide settings that decide bits, as numbers and names: it can be compared, pickled and
    written as JSON.

    A field has the name of torch's setting. float32_matmul_precision is None where torch cannot say it, since
    a newer setting (`torch.backends...fp32_precision`) contradicts it. The fp32_precision ones are those in
    effect, inherited or not. The reductions are torch's pairs (reduced precision, split K).
    """

    num_threads: int
    default_dtype: str
    flush_denormal: bool
    deterministic_algorithms: bool
    deterministic_algorithms_warn_only: bool
    cpu_allow_fp16_reduced_precision_reduction: bool
    float32_matmul_precision: str | None
    fp32_precision: str
    mkldnn_enabled: bool
    mkldnn_deterministic: bool
    mkldnn_fp32_precision: str
    mkldnn_matmul_fp32_precision: str
    mkldnn_conv_fp32_precision: str
    mkldnn_rnn_fp32_precision: str
    cuda_fp32_precision: str
    cuda_matmul_fp32_precision: str
    cuda_matmul_allow_fp16_accumulation: bool
    cuda_matmul_allow_fp16_reduced_precision_reduction: tuple[bool, bool]
    cuda_matmul_allow_bf16_reduced_precision_reduction: tuple[bool, bool]
    cuda_preferred_blas_library: str
    cudnn_enabled: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cudnn_conv_fp32_precision: str
    cudnn_rnn_fp32_precision: str

    @classmethod
    def read(cls) -> Self:
        """Those of this process."""
        precisions: dict[str, Any] = {
            name: torch._C._get_fp32_precision_getter(*of) for name, of in _PRECISIONS.items()
        }
        return cls(
            num_threads=torch.get_num_threads(),
            default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
            # torch sets it and cannot say it.
            flush_denormal=sys.float_info.min / 2 == 0.0,
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            deterministic_algorithms_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cpu_allow_fp16_reduced_precision_reduction=(
                torch._C._get_cpu_allow_fp16_reduced_precision_reduction()
            ),
            float32_matmul_precision=_float32_matmul_precision(),
            mkldnn_enabled=torch._C._get_mkldnn_enabled(),
            mkldnn_deterministic=torch._C._get_mkldnn_deterministic(),
            cuda_matmul_allow_fp16_accumulation=torch._C._get_cublas_allow_fp16_accumulation(),
            cuda_matmul_allow_fp16_reduced_precision_reduction=(
                torch._C._get_cublas_allow_fp16_reduced_precision_reduction()
            ),
            cuda_matmul_allow_bf16_reduced_precision_reduction=(
                torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
            ),
            cuda_preferred_blas_library=torch._C._get_blas_preferred_backend().name.lower(),
            cudnn_enabled=torch._C._get_cudnn_enabled(),
            cudnn_benchmark=torch._C._get_cudnn_benchmark(),
            cudnn_deterministic=torch._C._get_cudnn_deterministic(),
            **precisions,
        )

    def apply(self) -> None:
        """Make them those of this process. Of two that contradict each other the newer interface's counts, as
        in the process that they were read in."""
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(getattr(torch, self.default_dtype))
        torch.set_flush_denormal(self.flush_denormal)
        is_deterministic, warns = self.deterministic_algorithms, self.deterministic_algorithms_warn_only
        before = torch.are_deterministic_algorithms_enabled()
        if (before, torch.is_deterministic_algorithms_warn_only_enabled()) != (is_deterministic, warns):
            # It imports the compiler, for seconds.
            torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
        torch._C._set_mkldnn_enabled(self.mkldnn_enabled)
        torch._C._set_mkldnn_deterministic(self.mkldnn_deterministic)
        torch._C._set_cudnn_enabled(self.cudnn_enabled)
        torch._C._set_cudnn_benchmark(self.cudnn_benchmark)
        torch._C._set_cudnn_deterministic(self.cudnn_deterministic)
        matmul = cuda.matmul
        matmul.allow_fp16_accumulation = self.cuda_matmul_allow_fp16_accumulation
        matmul.allow_fp16_reduced_precision_reduction = (
            self.cuda_matmul_allow_fp16_reduced_precision_reduction
        )
        matmul.allow_bf16_reduced_precision_reduction = (
            self.cuda_matmul_allow_bf16_reduced_precision_reduction
        )
        # torch takes these two only where the hardware has a choice.
        reduces = self.cpu_allow_fp16_reduced_precision_reduction
        if torch._C._get_cpu_allow_fp16_reduced_precision_reduction() != reduces:
            torch._C._set_cpu_allow_fp16_reduced_precision_reduction(reduces)
        if cuda.preferred_blas_library().name.lower() != self.cuda_preferred_blas_library:
            cuda.preferred_blas_library(self.cuda_preferred_blas_library)
        # It sets some of those below.
        if self.float32_matmul_precision is not None:
            torch.set_float32_matmul_precision(self.float32_matmul_precision)
        for name, of in _PRECISIONS.items():
            # What is inherited is left so: a backend may inherit what it would refuse.
            if torch._C._get_fp32_precision_getter(*of) != getattr(self, name):
                torch._C._set_fp32_precision_setter(*of, getattr(self, name))

    def difference(self, other: NumericSettings) -> str | None:
        """The name of the first setting in which `other` differs; None where none does."""
        names = (field.name for field in fields(self))
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


def _float32_matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
