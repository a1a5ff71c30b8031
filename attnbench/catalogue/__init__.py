"""The catalogue: variants, inputs and tasks, and the arithmetic that variants share."""
