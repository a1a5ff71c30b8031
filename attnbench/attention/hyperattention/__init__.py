"""HyperAttention: exact attention inside blocks of hash-sorted tokens, the rest from a sample of keys."""

from attnbench.attention.hyperattention.algorithm import HyperAttention as HyperAttention
