"""Text to token ids for the HTTP process, so that no text of one client holds up another."""
