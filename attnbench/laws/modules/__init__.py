"""Questions to an unregistered module as it is: ``attnbench check FILE.py:Class`` asks them.

:mod:`~attnbench.laws.modules.probed_module` makes and calls it, :mod:`~attnbench.laws.modules.questions` measures, and
:mod:`~attnbench.laws.modules.summary` puts the findings into words.
"""
