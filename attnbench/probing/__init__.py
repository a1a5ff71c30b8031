"""Questions to an unregistered module as it is: ``attnbench check FILE.py:Class`` asks them.

:mod:`~attnbench.probing.subject` makes and calls it, :mod:`~attnbench.probing.questions` measures, and
:mod:`~attnbench.probing.verdict` puts the findings into words.
"""
