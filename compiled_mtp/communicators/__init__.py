"""How ranks add up and gather: over gloo, NCCL and symmetric memory."""
