"""What a terminal shows: progress, tables, plans and decisions."""
