"""PyTorch's compiler of attention kernels."""

from attnbench.attention.flex.algorithm import Flex

__all__ = ["Flex"]
