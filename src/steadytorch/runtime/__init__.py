"""Serving: the module that production calls."""
