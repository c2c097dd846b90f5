"""Books that a new lighthouse fills from the journal, and the status."""
