"""The maths of detectors: hangs, slow workers, unhealthy GPUs, spikes, conflicting words."""
