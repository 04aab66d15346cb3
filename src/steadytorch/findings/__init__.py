"""Findings that diagnosis rules report, and helpers that the rules share."""
