"""What surrounds a decode round: prefill, first tokens, catch-up, log probabilities, rounds in two phases."""
