"""Checks out git revisions into temporary folders, with a Python environment for each."""
