"""Inference engines other than PyTorch: export a model, convert it, call the converted model."""
