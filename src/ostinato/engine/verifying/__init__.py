"""Compares every graph of an engine with a slow, independent computation, on batches like real ones.

`verification` runs it all; `made_requests` and `made_steps` make what graphs run on, `reference_model` and
`reference_sampling` compute the expected results, `*_graphs` launch and compare.
"""
