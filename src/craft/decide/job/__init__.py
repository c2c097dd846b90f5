"""What the lighthouse knows of a job, and how events and actions change it."""
