"""Frozen, typed values that cross rooms: no I/O, no torch, no decisions."""
