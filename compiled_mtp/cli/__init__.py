"""The command line: `compiled-mtp run`, `chat`, `serve` and `export`, or `python -m compiled_mtp`."""
