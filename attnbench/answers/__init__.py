"""Answers from finished runs: verdicts, matched settings, claims, swaps and reports."""
