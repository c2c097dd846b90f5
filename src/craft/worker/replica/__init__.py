"""The replica that this worker is in, where a model is spread over several workers."""
