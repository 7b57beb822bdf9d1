"""Runs in a process with TRITON_INTERPRET=1 (see `test_speculation`); one printed line a check."""
