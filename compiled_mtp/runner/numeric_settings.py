"""torch's settings that decide bits: ranks take the settings of rank 0, and replicas compare theirs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch.backends import cuda

# torch's stubs leave out some of its members.
_C: Any = torch._C

# From the widest to the narrowest: a backend without a setting of its own inherits the wider one.
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
    """torch's process-wide settings that decide bits, as numbers and names that can be compared, pickled and
    written as JSON.

    Every field has the name of torch's setting. float32_matmul_precision is None where torch raises on
    reading it, because a newer setting (`torch.backends...fp32_precision`) contradicts it. The fp32_precision
    fields are the values in effect, inherited or not. The reductions are torch's pairs (reduced precision,
    split K).
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
        """Return the settings of this process."""
        precisions: dict[str, Any] = {
            name: _C._get_fp32_precision_getter(*of) for name, of in _PRECISIONS.items()
        }
        return cls(
            num_threads=torch.get_num_threads(),
            default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
            # torch has a setter for it and no getter.
            flush_denormal=sys.float_info.min / 2 == 0.0,
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            deterministic_algorithms_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cpu_allow_fp16_reduced_precision_reduction=(_C._get_cpu_allow_fp16_reduced_precision_reduction()),
            float32_matmul_precision=_float32_matmul_precision(),
            mkldnn_enabled=_C._get_mkldnn_enabled(),
            mkldnn_deterministic=_C._get_mkldnn_deterministic(),
            cuda_matmul_allow_fp16_accumulation=_C._get_cublas_allow_fp16_accumulation(),
            cuda_matmul_allow_fp16_reduced_precision_reduction=(
                _C._get_cublas_allow_fp16_reduced_precision_reduction()
            ),
            cuda_matmul_allow_bf16_reduced_precision_reduction=(
                _C._get_cublas_allow_bf16_reduced_precision_reduction()
            ),
            cuda_preferred_blas_library=_C._get_blas_preferred_backend().name.lower(),
            cudnn_enabled=_C._get_cudnn_enabled(),
            cudnn_benchmark=_C._get_cudnn_benchmark(),
            cudnn_deterministic=_C._get_cudnn_deterministic(),
            **precisions,
        )

    def apply(self) -> None:
        """Give this process these settings.

        Where two settings contradict each other, the newer interface's is set last and wins, as in the
        process that `read` read.
        """
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(getattr(torch, self.default_dtype))
        torch.set_flush_denormal(self.flush_denormal)
        is_deterministic, warns = self.deterministic_algorithms, self.deterministic_algorithms_warn_only
        before = torch.are_deterministic_algorithms_enabled()
        if (before, torch.is_deterministic_algorithms_warn_only_enabled()) != (is_deterministic, warns):
            # The call imports the compiler, which takes seconds.
            torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
        _C._set_mkldnn_enabled(self.mkldnn_enabled)
        _C._set_mkldnn_deterministic(self.mkldnn_deterministic)
        _C._set_cudnn_enabled(self.cudnn_enabled)
        _C._set_cudnn_benchmark(self.cudnn_benchmark)
        _C._set_cudnn_deterministic(self.cudnn_deterministic)
        matmul = cuda.matmul
        matmul.allow_fp16_accumulation = self.cuda_matmul_allow_fp16_accumulation
        matmul.allow_fp16_reduced_precision_reduction = (
            self.cuda_matmul_allow_fp16_reduced_precision_reduction
        )
        matmul.allow_bf16_reduced_precision_reduction = (
            self.cuda_matmul_allow_bf16_reduced_precision_reduction
        )
        # torch accepts these two only on hardware that has a choice.
        reduces = self.cpu_allow_fp16_reduced_precision_reduction
        if _C._get_cpu_allow_fp16_reduced_precision_reduction() != reduces:
            _C._set_cpu_allow_fp16_reduced_precision_reduction(reduces)
        if _C._get_blas_preferred_backend().name.lower() != self.cuda_preferred_blas_library:
            cuda.preferred_blas_library(self.cuda_preferred_blas_library)
        # Before the fp32_precision settings: this call changes some of them.
        if self.float32_matmul_precision is not None:
            torch.set_float32_matmul_precision(self.float32_matmul_precision)
        for name, of in _PRECISIONS.items():
            # An inherited value stays inherited: a backend may inherit a value that its setter refuses.
            if _C._get_fp32_precision_getter(*of) != getattr(self, name):
                _C._set_fp32_precision_setter(*of, getattr(self, name))

    def difference(self, other: NumericSettings) -> str | None:
        """The name of the first setting in which `other` differs; None if all are equal."""
        names = (field.name for field in fields(self))
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


def _float32_matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
