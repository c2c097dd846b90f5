"""The role ``Group`` and its implementations."""
