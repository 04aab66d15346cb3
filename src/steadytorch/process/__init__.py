"""Worker processes: code that may crash, hang or leak runs in a process of its own.

This room knows processes and messages, and nothing of what is asked of them: a worker serves the
methods of a handler object that is named by its import path.
"""
