"""Random small training scripts under random kills: each must end exact, or refused with a sentence."""
