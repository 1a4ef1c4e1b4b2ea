"""From a config to programs that run plans: resolved settings, memory, masks, launches."""
