"""One suite on many machines: an engine says which machines there are, a driver shares the cells out among them."""
