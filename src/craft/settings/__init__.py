"""The only reader of the environment and of craft.toml."""
