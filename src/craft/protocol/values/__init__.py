"""Small value types that events and messages are made of."""
