"""The training loop, the step in flight, and what happens around both."""
