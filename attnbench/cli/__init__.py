"""The command line: each command has a file that parses, calls and shows; only ``console.py`` prints."""
