"""Engines beyond PyTorch: exporting a model, converting it, and calling the result."""
