"""Small value types used in events and messages."""
