"""Compiled shapes: buckets, compilation, portable caches. They take callables and know no model.

They are imported as `compiled_mtp.graphs` only: PyPI has a package called `graphs`.
"""

if __name__ != "compiled_mtp.graphs":
    raise ImportError(
        f"import compiled_mtp.graphs, not {__name__}: the folder is part of the package compiled_mtp"
    )
