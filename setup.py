"""What pyproject.toml cannot say: an sdist keeps the links of the tree, so that its tests run in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class SdistWithLinks(sdist):
    """The sdist as setuptools makes it, and `compiled_mtp/ops` and `compiled_mtp/graphs` as links."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name in ("ops", "graphs"):
            os.symlink(Path("..") / name, Path(base_dir) / "compiled_mtp" / name)


setup(cmdclass={"sdist": SdistWithLinks})
