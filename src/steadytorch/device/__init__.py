"""Everything that asks the driver, the operating system or PyTorch about the machine."""
