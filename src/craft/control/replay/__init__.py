"""What the journal remembers: books that a new lighthouse fills from it, and the status."""
