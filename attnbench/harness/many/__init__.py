"""One suite on many machines: an engine lists the machines, a driver shares the cells out among them."""
