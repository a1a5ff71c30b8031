"""PyTorch's compiler of attention kernels."""

from attnbench.catalogue.attention.exact.flex.flex import Flex as Flex
