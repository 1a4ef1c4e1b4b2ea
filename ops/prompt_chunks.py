"""How many prompt chunks share a launch, and where their rows begin. No torch."""

from __future__ import annotations

MAX_PROMPT_CHUNKS = 16
"""The most prompt chunks of a launch. Launches with fewer start programs that find nothing to do."""
PROMPT_CHUNK_MULTIPLE = 8
"""A prompt chunk begins at a row of the launch that is a multiple of this."""
