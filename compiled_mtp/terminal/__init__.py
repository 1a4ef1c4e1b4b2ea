"""Shared by the commands: flags, signals, standard error and exit codes."""
