"""Log probabilities and ranks of chosen ids, and the likeliest ids, of rows of logits."""

from compiled_mtp.ops.row_logprobs.reference import NUM_TOP, RowLogprobs, row_logprobs

__all__ = ["NUM_TOP", "RowLogprobs", "row_logprobs"]
