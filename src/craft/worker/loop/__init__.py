"""The training loop and the step in flight."""
