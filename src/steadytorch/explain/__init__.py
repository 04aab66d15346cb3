"""Explanations of where the time of a workload or of a trace file goes."""
