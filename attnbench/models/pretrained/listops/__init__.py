"""The project's own trained encoders, of ListOps."""
