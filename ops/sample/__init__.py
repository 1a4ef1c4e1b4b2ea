"""From a row of logits to its token: processors, filters, position-keyed noise, argmax."""

from compiled_mtp.ops.sample.op import sample

__all__ = ["sample"]
