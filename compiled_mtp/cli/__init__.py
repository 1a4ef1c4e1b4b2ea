"""The command line: `compiled-mtp COMMAND`, or `python -m compiled_mtp COMMAND`; `main.py` lists them."""
