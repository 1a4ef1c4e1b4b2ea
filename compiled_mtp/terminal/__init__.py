"""What commands share: flags, signals, one line for an error."""
