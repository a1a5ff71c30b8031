"""The harness: a plan becomes rows, by processes that measure."""
