"""Worker processes: isolate code that may crash, hang or leak.

A worker serves the methods of a handler object, which is named by its import path. This package
knows processes and messages only.
"""
