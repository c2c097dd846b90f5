"""Files of settings: craft.toml, private files, checksums."""
