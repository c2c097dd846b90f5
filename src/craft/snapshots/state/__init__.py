"""The training state as named tensors: walk it, hash it, serialize it, copy it."""
