"""CUDA graphs: recorded, patched to read and write the caller's tensors, whole training steps."""
