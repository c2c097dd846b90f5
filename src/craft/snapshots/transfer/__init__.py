"""Move the training state between live workers."""
