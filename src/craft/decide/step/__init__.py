"""The decisions about a step: the tree, the plan, the ledger, settlement."""
