"""Watch the workers of this host, and take their stacks."""
