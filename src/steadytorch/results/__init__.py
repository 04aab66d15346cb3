"""Result structs that plans store and `--json` writes. This package does not import PyTorch."""
