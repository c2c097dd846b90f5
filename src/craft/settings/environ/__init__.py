"""Environment variables of other software: CUDA, NCCL, and the frameworks."""
