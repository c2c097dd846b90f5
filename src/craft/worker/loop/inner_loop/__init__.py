"""The inner loop of a step: microbatches one by one, hooks, injected faults, gathered rows."""
