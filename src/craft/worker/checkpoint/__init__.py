"""Take checkpoints, begin from one, roll back to one."""
