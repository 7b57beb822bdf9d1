"""What the two processes say to each other."""
