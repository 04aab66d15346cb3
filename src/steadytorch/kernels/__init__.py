"""Fused operators for memory-bound steps, written in Triton and registered with PyTorch."""
