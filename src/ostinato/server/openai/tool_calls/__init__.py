"""Tool calls as models write them, found in text while it streams."""
