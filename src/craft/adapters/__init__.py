"""Adapters: each package maps the hooks of another framework to CRAFT. They do not import each other."""
