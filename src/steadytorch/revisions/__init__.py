"""Revisions of a git repository: their trees in temporary folders, and an environment for each."""
