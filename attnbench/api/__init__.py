"""The commands as functions: measure, compare, read and draw from a script or a notebook.

A terminal and a notebook show a progress bar, and a pipe a line a minute. ``progress=False`` shows nothing.
"""
