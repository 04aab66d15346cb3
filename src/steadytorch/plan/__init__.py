"""Plans as data: the chosen candidate, its evidence, its key and its file."""
