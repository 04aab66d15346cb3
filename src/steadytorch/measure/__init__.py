"""Clocks, samplers, timing statistics, and comparisons of callables."""
