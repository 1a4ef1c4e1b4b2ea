"""Requests, their metrics and their outputs. No torch."""

from __future__ import annotations

from compiled_mtp.request.metrics import RequestHistory, RequestMetrics
from compiled_mtp.request.output import ErrorKind, FinishReason, RequestOutput, RoundDrafts, RoutedExperts
from compiled_mtp.request.request import NO_DRAFT, Detokenizer, Guide, PromptImage, Request, derive_seed
from compiled_mtp.sampling.sampling_params import SamplingParams

__all__ = [
    "NO_DRAFT",
    "Detokenizer",
    "ErrorKind",
    "FinishReason",
    "Guide",
    "PromptImage",
    "Request",
    "RequestHistory",
    "RequestMetrics",
    "RequestOutput",
    "RoundDrafts",
    "RoutedExperts",
    "SamplingParams",
    "derive_seed",
]
