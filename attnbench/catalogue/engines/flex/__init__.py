"""FlexAttention, compiled once for each module."""
