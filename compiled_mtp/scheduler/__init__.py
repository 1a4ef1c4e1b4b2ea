"""Decides which requests run, on how many tokens, slots and blocks. Pure host arithmetic: no torch."""

from compiled_mtp.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
