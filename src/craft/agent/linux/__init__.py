"""What an agent asks of the kernel: forks, /proc, scratch space."""
