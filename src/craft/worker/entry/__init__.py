"""How a process becomes a worker and runs the script."""
