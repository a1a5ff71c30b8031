"""A report: one HTML file that answers, shows and holds every row of one run or several, and needs no network."""
