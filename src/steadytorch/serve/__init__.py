"""Plans that serve: applied to a model, loaded from a file, moved between machines."""
