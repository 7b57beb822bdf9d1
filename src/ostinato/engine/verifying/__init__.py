"""Every graph of an engine against a slow computation of its own, on batches like real ones.

`verification` is the way through; `made_requests` and `made_steps` make what graphs are run on,
`reference_model` and `reference_sampling` say what must come out, `*_graphs` launch and compare.
"""
