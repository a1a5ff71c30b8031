"""Attention within clusters: every centroid picks the queries and keys nearest to it."""

from attnbench.attention.routing.algorithm import Routing as Routing
