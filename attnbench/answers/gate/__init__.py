"""Whether a run is worse than older ones."""
