"""The process that owns the engine: token ids in, token ids out, and nothing but steps between."""
