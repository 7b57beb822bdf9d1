"""The live page at `/`: one file, no build step."""
