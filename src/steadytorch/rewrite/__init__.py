"""Tools to copy, trace and rewrite a model, shared by transforms."""
