"""The token that a draft thinks likeliest, put where verification and the next pass find it."""

from torch import Tensor


def note_best(
    logits: Tensor, rows: Tensor, number: int, drafts: Tensor, target_offsets: Tensor | None
) -> Tensor:
    """int64 [R]: the best token of float32 logits [R, draft vocabulary], also draft `number` of its row.

    `rows` int32 [R]; `drafts` [max_rows, K]. `target_offsets` int64 [draft vocabulary]: what is added to an
    id of the draft to make it the target's; None: they are the same. Padding's is 0.
    """
    if logits.is_cuda:
        from . import triton_draft_tokens

        return triton_draft_tokens.note_best(logits, rows, number, drafts, target_offsets)
    best = logits.argmax(-1)
    if target_offsets is not None:
        best = best + target_offsets.index_select(0, best)
    best = best * (rows != 0)
    drafts[:, number].index_copy_(0, rows.long(), best.to(drafts.dtype))
    return best
