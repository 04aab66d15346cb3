"""Serving: runs tuned models in production."""
