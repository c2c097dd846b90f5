"""This worker as a member: generations, group opening, the ledger, small collectives."""
