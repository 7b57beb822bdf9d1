"""What requests ask of sampling beyond a temperature and a seed, by request row."""

from typing import NamedTuple

from torch import Tensor


class Asked(NamedTuple):
    """Of n request rows; row 0 is padding's and asks for nothing, whatever is written there."""

    temperature: Tensor
    """float32 [n]; 0 is greedy."""
    seeds: Tensor
    """int64 [n]: any values; equal seeds give equal draws at equal positions."""
    lengths: Tensor
    """int32 [n]: where in its request the new token will stand."""
    top_k: Tensor
    """int32 [n]: keep the k most likely tokens; 0 or less: all."""
    top_p: Tensor
    """float32 [n]: keep the most likely tokens until their sum reaches p; 1: all."""
    min_p: Tensor
    """float32 [n]: drop tokens less likely than min_p times the most likely one; 0: none."""
    repetition: Tensor
    """float32 [n]: divides positive and multiplies negative logits of tokens seen anywhere; 1: off."""
    presence: Tensor
    """float32 [n]: subtracted once from tokens generated before; 0: off."""
    frequency: Tensor
    """float32 [n]: subtracted per occurrence from tokens generated before; 0: off."""
    num_biases: Tensor
    """int32 [n]: how many of the next two count; the others are (0, 0.0)."""
    bias_ids: Tensor
    """int32 [n, most]: tokens, each once, ascending."""
    bias_values: Tensor
    """float32 [n, most]: what is added to their logits."""
    banned: Tensor
    """int32 [n, most]: tokens that may not come yet; -1 is none."""
    banned_before: Tensor
    """int32 [n]: the length from which on they may."""
    num_logprobs: Tensor
    """int32 [n]: of so many likeliest tokens the log-probability is told; -1: not even of the chosen one."""
    in_prompt: Tensor
    """bool [n, vocab]: whether it is in the prompt, of rows with penalties."""
    masks: Tensor
    """int32 [n, words]: a bit for each token that may come, the lowest first."""
    generated: Tensor
    """int32 [n, vocab]: how often each token was generated, of rows with penalties. Sampling counts on."""

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what decides which tokens are left to draw from."""
        return self.temperature, self.top_k, self.top_p, self.min_p
