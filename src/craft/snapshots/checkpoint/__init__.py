"""Write, list, verify, restore and remove checkpoints."""
