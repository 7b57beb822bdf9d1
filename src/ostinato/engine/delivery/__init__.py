"""From tokens to what callers read: text, stop strings, growing outputs."""
