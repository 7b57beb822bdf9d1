"""Models that guess the next tokens of another one: heads on its features, and smaller models."""
