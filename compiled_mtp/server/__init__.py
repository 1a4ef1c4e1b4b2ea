"""The HTTP service: OpenAI's and Anthropic's APIs over an AsyncEngine (extra `compiled-mtp[server]`)."""
