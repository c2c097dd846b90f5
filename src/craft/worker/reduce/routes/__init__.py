"""The routes of gradient blocks; the tree, not the route, fixes the bits."""
