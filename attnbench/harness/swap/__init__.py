"""Variants in the place of a trained model's attention."""
