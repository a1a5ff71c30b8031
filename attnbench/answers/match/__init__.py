"""Settings of variants that meet one budget."""
