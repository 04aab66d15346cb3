"""Rendering of frozen results; nothing here computes a figure."""
