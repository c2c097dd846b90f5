"""Checks while training: equal bits, finite numbers, speed, the GPU."""
