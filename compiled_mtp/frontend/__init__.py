"""Text in, text out: tokenizer, chat template, the Hub, and the processing of requests."""
