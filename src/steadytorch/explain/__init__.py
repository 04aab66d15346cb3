"""Explanations: a workload or a trace file, captured, analysed and kept as data."""
