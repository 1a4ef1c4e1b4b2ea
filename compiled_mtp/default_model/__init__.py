"""The checkpoint that ships; see README.md in this folder."""
