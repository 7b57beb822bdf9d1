"""The engine as the HTTP process sees it: a process to start, watch and talk to."""
