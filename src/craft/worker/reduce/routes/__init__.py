"""How blocks of gradients travel; the tree, not the route, fixes the bits."""
