"""The agent, one per host: starts workers, sees them die, relays their messages."""
