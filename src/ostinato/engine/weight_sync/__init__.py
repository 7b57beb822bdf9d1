"""Weights from a trainer's process: how they arrive, in vLLM's and SGLang's formats, and for which caller.

`foreign_pickles` reads the pickles without running them, `foreign_tensors` finds the memory they refer to,
`wire_formats` turns both into named tensors. A trainer broadcasts through `broadcast_groups` or
`stateless_nccl`; `received_weights` receives. `trainer_link` combines all of this for one engine. Only
`ServedWeights` writes the result.
"""
