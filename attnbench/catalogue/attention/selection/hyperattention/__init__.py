"""HyperAttention: exact attention inside blocks of hash-sorted tokens, the rest from a sample of keys."""

from attnbench.catalogue.attention.selection.hyperattention.hyperattention import HyperAttention as HyperAttention
