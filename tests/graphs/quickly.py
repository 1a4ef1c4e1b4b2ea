"""Exports a graph cache without waiting for the compiler more than a test needs."""

# For the exporting process, before it exports. Rounds alone get kernels of their own, each of which takes the
# compiler two seconds; the other programs are compiled to calls of ATen.
EXPORT_QUICKLY = """
import gc
gc.disable()
import torch._inductor.config as inductor
from compiled_mtp.runner import program_maker
save = program_maker.save_program
def save_quickly(function, *rest):
    as_called = {"fallback_by_default": function.__name__ != "decode"}
    with inductor.patch(as_called if hasattr(inductor, "fallback_by_default") else {}):
        save(function, *rest)
program_maker.save_program = save_quickly
"""
