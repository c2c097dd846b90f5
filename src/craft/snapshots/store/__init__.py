"""Where checkpoints are kept: local and remote stores, manifests, leases on them."""
