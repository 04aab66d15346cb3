"""Clocks, samplers, statistics and races between any two callables."""
