"""Linformer: keys and values are projected along the sequence to a fixed number of rows."""

from attnbench.attention.linformer.algorithm import Linformer as Linformer
