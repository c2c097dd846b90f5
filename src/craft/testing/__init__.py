"""Public test tools: fault injection, and a checker for the history of a run."""
