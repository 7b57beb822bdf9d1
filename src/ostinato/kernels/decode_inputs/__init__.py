"""The inputs of a decode step, read from the request slots."""
