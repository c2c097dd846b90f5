"""Compare and watch while training: bits, numbers, speed, the GPU."""
