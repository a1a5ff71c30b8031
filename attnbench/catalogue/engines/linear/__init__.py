"""Linear attention, φ(q)·φ(k) in place of exp(q·k): feature maps, and sums over all keys at once or causally."""
