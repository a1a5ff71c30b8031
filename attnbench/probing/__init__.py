"""Questions to a module that is no registered variant, as it is: what ``attnbench check FILE.py:Class`` asks.

:mod:`~attnbench.probing.subject` makes and calls it, :mod:`~attnbench.probing.questions` measures, and
:mod:`~attnbench.probing.verdict` says in words what was found.
"""
