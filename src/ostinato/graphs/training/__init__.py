"""Training from graphs: whole steps, and parts of a model with their backward."""
