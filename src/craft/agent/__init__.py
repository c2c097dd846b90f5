"""The agent, one per host: starts workers, detects their end, relays their messages."""
