"""From a row of logits to its token: processors, filters, position-keyed noise, argmax."""

from compiled_mtp.ops.sample.reference import Sampled, SamplingTables, sample

__all__ = ["Sampled", "SamplingTables", "sample"]
