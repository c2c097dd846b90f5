"""Journal, metrics and logs."""
