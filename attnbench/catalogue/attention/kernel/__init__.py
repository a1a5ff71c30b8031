"""Kernels: another score of two tokens in place of softmax's, often by features."""
