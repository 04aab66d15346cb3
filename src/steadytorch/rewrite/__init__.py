"""Tools to copy, trace and rewrite models, shared by the transforms."""
