"""What this worker tells others: channel, reports, step log, activity page, stacks."""
