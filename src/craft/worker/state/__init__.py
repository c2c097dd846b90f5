"""What must follow the job besides tensors, and the checks before the first step."""
