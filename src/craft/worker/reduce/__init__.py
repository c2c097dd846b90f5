"""From gradients to their mean: buckets, accumulation, exchange."""
