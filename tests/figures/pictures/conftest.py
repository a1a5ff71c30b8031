"""What is written in a figure, and whether it can be read, as for the figures of runs."""

from tests.figures.conftest import _seldom_collected, faults, words  # noqa: F401  # fixtures
