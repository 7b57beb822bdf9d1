"""One engine, stepped by a thread, for the coroutines of event loops."""
