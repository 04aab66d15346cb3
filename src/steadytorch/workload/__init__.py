"""Workloads: models with their inputs, loading, bundled models and input signatures."""
