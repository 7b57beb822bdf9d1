"""Those who share the server: their keys, quotas and fair shares."""
