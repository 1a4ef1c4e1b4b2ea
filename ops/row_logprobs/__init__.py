"""Of rows of logits the log probabilities of chosen ids, their ranks and the likeliest ids."""

from compiled_mtp.ops.row_logprobs.reference import NUM_TOP, RowLogprobs, row_logprobs

__all__ = ["NUM_TOP", "RowLogprobs", "row_logprobs"]
