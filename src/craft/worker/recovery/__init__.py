"""Join a running job: fetch the state, follow, catch up, undo."""
