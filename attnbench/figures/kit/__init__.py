"""The parts that figures share: pages, colours, labels, ticks and keys."""
