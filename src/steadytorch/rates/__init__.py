"""Rates: the work of operators and kernels, held against the limits of the device."""
