"""A variant's score on a task: the encoder around it, trained for a fixed number of steps and tested once."""
