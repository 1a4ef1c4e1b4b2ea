"""Storage formats of quantised weights: which tensors hold one, and how its values follow."""
