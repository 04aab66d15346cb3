"""Connections to other packages; importing one imports its package, importing steadytorch none."""
