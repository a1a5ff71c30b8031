"""The judgement whether a run is worse than older ones."""
