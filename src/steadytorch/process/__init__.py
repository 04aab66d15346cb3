"""Worker processes, which isolate code that may crash, hang or leak resources.

A worker process runs the methods of a handler object, whose class is given by import path. This
package contains only process management and messaging.
"""
