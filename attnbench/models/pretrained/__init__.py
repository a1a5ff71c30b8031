"""Models that are trained already, and their attention in the hands of a variant."""
