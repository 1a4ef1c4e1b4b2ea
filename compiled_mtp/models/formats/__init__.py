"""Storage formats of quantised weights: which tensors hold a weight, and how its values are computed."""
