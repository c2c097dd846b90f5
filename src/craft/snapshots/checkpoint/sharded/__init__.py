"""Restore checkpoints of sharded models at any mesh."""
