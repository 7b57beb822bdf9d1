"""Weights of a trainer's process: how they come here, in the formats of vLLM and SGLang, and who asks for it.

`foreign_pickles` reads their pickles without running them, `foreign_tensors` finds the memory they speak of,
`wire_formats` makes named tensors of both. `broadcast_groups` and `stateless_nccl` are what a trainer
broadcasts through, `received_weights` where it arrives. `trainer_link` is all of that for one engine; what
comes of it is written by `ServedWeights` and nobody else.
"""
