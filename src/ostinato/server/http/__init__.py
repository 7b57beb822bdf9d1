"""HTTP: the application, its limits and keys, and its endpoints."""
