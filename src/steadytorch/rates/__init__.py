"""Rates of operators and kernels, compared with the measured limits of the device."""
