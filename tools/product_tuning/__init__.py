"""Parts of tools/tune_products.py: products, ways to run them, candidates, a stack of layers, tables."""
