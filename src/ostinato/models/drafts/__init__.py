"""Models that guess the next tokens of another model: heads on its features, and smaller models."""
