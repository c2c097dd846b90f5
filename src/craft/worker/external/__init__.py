"""Workers whose loop and groups belong to another framework."""
