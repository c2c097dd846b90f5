"""Watch the workers of this host for hangs, and take their stacks."""
