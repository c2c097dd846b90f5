"""Reports of a worker: channel, reporter, step log, activity page, stacks."""
