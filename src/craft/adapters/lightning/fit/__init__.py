"""How a fit runs: its steps cut into microbatches, or whole on every worker."""
