"""The contract: a variant, an input and a task, and what each may claim of itself."""
