"""Renders finished results as text and HTML; figures are computed elsewhere."""
