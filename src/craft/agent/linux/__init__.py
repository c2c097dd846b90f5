"""The agent's use of Linux: forks, /proc, scratch space."""
