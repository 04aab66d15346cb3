"""Plans as data: the choice, its evidence, its key and its file."""
