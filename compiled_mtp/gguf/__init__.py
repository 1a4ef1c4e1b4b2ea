"""GGUF files: one file, or parts of one, with weights, config and tokenizer of a model."""
