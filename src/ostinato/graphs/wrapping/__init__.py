"""The one-line door for functions and modules."""
