"""From a config to programs that run plans: what follows from it, memory, masks, launches."""
