"""References: limits, oracles and noise, beside which a variant is read."""
