"""Line-based files: the journal and metrics, and how they survive full and slow disks."""
