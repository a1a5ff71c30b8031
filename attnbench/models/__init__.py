"""Models around a variant: layers, encoders and decoders, and models that are trained already."""
