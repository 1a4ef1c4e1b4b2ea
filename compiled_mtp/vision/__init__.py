"""Images: decoding, patches, positions, and the vision tower."""
