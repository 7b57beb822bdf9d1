"""Speculation on the device: drafts from a row's own text, the inputs of verification, and acceptance.

A row has L positions in its cache and a token that stands at L. Verification computes that token and k drafts
behind it in one step of q = k + 1 tokens a request, draws t_0 to t_k, and keeps t_0 to t_a, where a is the
number of drafts that equal what was drawn:

    position     L      L+1   L+2   L+3
    computed     last   d_1   d_2   d_3      d_1 = t_0, d_2 = t_1, d_3 != t_2: a = 2
    drawn        t_0    t_1   t_2   t_3      kept: t_0 t_1 t_2; L becomes L + 3, the last token t_2

A draw depends on seed and position alone, so what is kept is what single steps would have drawn. Nothing of
it is read by the host before the next step. On a GPU Triton's kernels do it, on a CPU plain torch: fixed
shapes, no host reads. Row 0 belongs to padding and stays as it is.
"""
