"""``craft checkpoints``: its commands, how they find checkpoints, and the tables that they print."""
