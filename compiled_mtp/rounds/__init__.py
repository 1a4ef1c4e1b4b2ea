"""Launches beside the decode round: prefill, first token, catch-up, log probabilities, two-phase rounds."""
