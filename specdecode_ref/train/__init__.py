"""Training a draft for a target, on text that the target writes itself: read `run` first."""
