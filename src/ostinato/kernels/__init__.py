"""Device code: attention and sampling, each kernel beside a plain-torch reference of the same function."""
