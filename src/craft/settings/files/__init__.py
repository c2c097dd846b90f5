"""Settings files: craft.toml, private files, checksums."""
