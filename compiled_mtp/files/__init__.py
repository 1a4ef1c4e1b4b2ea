"""Brings bytes of files to memory and to a GPU."""
