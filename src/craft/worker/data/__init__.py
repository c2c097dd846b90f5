"""Sources of microbatches, and the order of their samples."""
