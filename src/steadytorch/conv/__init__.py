"""Convolution engines of cuDNN: listed, chosen by measurement, kept by name, and run."""
