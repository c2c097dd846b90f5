"""Where microbatches come from, and in which order."""
