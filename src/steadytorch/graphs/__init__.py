"""CUDA graphs: recorded nodes, patched to read and write the caller's tensors."""
