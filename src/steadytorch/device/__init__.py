"""Observations of the machine, from the driver, the operating system and PyTorch."""
