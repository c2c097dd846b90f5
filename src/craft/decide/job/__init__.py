"""The lighthouse's view of a job, and how events and actions change it."""
