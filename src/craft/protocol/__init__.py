"""Frozen, typed values that packages exchange: no I/O, no torch, no decisions."""
