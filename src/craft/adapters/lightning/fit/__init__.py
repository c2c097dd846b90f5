"""How a fit runs: its steps divided into microbatches, or computed as a whole by every worker."""
