"""The operators of the engine: each has a reference, a kernel and one registration.

Import them as `compiled_mtp.ops` only. PyPI has a package called `ops`, and under a second import name torch
would register every operator twice.
"""

if __name__ != "compiled_mtp.ops":
    raise ImportError(f"import compiled_mtp.ops, not {__name__}: the folder is part of that package")
