"""The problem that attention solves: shapes, masks, biases, and the reference that errors are measured against."""
