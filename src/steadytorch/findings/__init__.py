"""Findings: what a rule may report, and the helpers that rules share."""
