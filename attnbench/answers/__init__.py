"""Answers from finished runs: verdicts, matched settings, claims and reports."""
