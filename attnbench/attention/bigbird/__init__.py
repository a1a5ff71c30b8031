"""BigBird attention: random, window and global blocks."""

from attnbench.attention.bigbird.algorithm import BigBird as BigBird
