"""How many prompts share a launch, and where their rows begin. No torch."""

from __future__ import annotations

MAX_PROMPT_CHUNKS = 16
"""The most prompts that share a launch. Each costs programs that find nothing to do where there are fewer."""
PROMPT_CHUNK_MULTIPLE = 8
"""A prompt's rows begin at a multiple of this many rows of the launch."""
