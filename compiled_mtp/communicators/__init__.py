"""How ranks sum and gather tensors: over gloo, NCCL and symmetric memory."""
