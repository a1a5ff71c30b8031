"""Fixed patterns: which keys a query meets does not depend on the content."""
