"""What ``craft.join()`` returns: job, steps, exchange, commit."""
