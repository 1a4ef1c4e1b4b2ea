"""Sampling parameters, log probabilities, grammars and stop strings of a request."""
