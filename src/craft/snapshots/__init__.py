"""Training state as named tensors: walk it, hash it, copy it."""
