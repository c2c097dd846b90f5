"""Files of lines: the journal, metrics, and how they survive full and slow disks."""
