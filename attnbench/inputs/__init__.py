"""Where q, k and v come from, in the order shown to users; imported when the table of inputs is first asked."""

from attnbench.inputs import gaussian as gaussian
from attnbench.inputs import structured as structured
from attnbench.inputs import captured as captured
