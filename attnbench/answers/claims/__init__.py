"""Claims of papers, and the rows that decide them."""
