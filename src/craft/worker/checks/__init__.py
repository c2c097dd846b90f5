"""Checks of the script: refuse or warn of what would go wrong unseen."""
