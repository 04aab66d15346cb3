"""CUDA graphs: recording whole training steps, and patching recorded nodes."""
