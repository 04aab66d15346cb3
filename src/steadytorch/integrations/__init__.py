"""Callbacks for trainers; importing one imports its package, importing steadytorch none."""
