"""Results as data: what plans hold and `--json` writes. Nothing here imports PyTorch."""
