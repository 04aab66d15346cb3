"""Code compiled ahead of time: packages, bundles and how `compile` takes them."""
