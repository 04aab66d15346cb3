"""Traces of PyTorch's profiler, read into columns, and the parts that they consist of."""
