"""Linear attention, φ(q)·φ(k) in place of exp(q·k): feature maps, and sums over keys all at once or causally."""
