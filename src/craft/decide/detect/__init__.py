"""The maths of detectors: hangs, slow workers, sick GPUs, spikes, conflicting words."""
