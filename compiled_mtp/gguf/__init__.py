"""GGUF files: one file, or the parts of a split one, with a model's weights, config and tokenizer."""
