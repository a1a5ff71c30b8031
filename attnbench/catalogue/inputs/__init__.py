"""Sources of q, k and v, in the order shown to users; imported at the first look-up in the table of inputs."""

from attnbench.catalogue.inputs import gaussian as gaussian
from attnbench.catalogue.inputs import structured as structured
from attnbench.catalogue.inputs import captured_qkv as captured_qkv
