"""The process groups of torch inside a sharded replica."""
