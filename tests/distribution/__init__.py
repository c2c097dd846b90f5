"""The wheel: what is in it, and whether it works without the repository."""
