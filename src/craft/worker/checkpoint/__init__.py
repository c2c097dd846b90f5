"""Take checkpoints, begin from one, go back to one."""
