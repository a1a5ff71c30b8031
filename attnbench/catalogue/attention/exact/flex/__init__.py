"""PyTorch's compiler of attention kernels."""

from attnbench.catalogue.attention.exact.flex.algorithm import Flex as Flex
