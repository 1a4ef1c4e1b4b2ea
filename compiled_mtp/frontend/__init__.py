"""Text in, text out: tokenizer, chat template, the Hub, and what a request asks for."""
