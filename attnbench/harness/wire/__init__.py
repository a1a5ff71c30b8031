"""Messages between the parent and the worker, and the state of the process that both must know."""
