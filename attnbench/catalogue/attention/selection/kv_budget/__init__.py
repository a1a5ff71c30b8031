"""Softmax attention whose steps after a prompt read a part of its keys; the others are evicted, or left in pages."""
