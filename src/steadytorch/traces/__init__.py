"""Reads PyTorch profiler traces into columns, and finds their steps, launches and faults."""
