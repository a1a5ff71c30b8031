"""Trained models: the inputs of their attention, and their quality with another attention."""
