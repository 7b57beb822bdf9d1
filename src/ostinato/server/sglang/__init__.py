"""SGLang's own API, for scripts that are written against it."""
