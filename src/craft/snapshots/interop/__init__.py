"""Other formats: torch.distributed.checkpoint, and export to plain files."""
