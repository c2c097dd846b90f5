"""Measure whether this machine is fit for jobs: probes, the judgement, its findings."""
