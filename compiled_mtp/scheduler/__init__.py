"""Who runs, how many tokens, which slots and blocks. Pure host arithmetic: no torch."""

from compiled_mtp.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
