"""Pure decisions: no I/O, no clock, no thread, no torch. Time, where it matters, is an argument."""
