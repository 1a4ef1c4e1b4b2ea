"""The scenarios of tools/bench_engine.py, a module each; `common` has what they share."""
