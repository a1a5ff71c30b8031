"""PyTorch's compiler of attention kernels."""

from attnbench.attention.flex.algorithm import Flex as Flex
