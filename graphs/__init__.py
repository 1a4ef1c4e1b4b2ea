"""Compiled shapes: buckets, compilation, portable caches. These modules take callables and know no model.

Import them only as `compiled_mtp.graphs`: PyPI has a package called `graphs`.
"""

if __name__ != "compiled_mtp.graphs":
    raise ImportError(
        f"import compiled_mtp.graphs, not {__name__}: the folder is part of the package compiled_mtp"
    )
