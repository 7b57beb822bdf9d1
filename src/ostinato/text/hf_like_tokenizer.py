"""A model's tokenizer with the calls and names of transformers' tokenizers, which scripts for vLLM expect
from `get_tokenizer()`. Only what such scripts use; anything else is an AttributeError."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import TokenizerError
from .tokenizer import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class HFLikeTokenizer:
    """Text to token ids and back, as in transformers."""

    is_fast = True

    def __init__(self, tokenizer: Tokenizer, name_or_path: str, model_max_length: int) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.model_max_length = model_max_length
        self._cutting: tuple[int, Any] = (-1, None)
        """The tokenizer that truncated texts last, with its length limit."""

    # -- text and ids ------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> Any:
        """Token ids; a tensor with one row for return_tensors="pt"."""
        if truncation or max_length is not None:
            longest = max_length if max_length is not None else self.model_max_length
            ids = self._cut_ids(text, text_pair, add_special_tokens, longest)
        else:
            ids = self._ids(text, text_pair, add_special_tokens)
        return _as_tensors([ids], return_tensors) if return_tensors else ids

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> Encoded:
        """`input_ids` and `attention_mask` of one text or several."""
        single = isinstance(text, str)
        lines = [
            self.encode(each, text_pair, add_special_tokens, truncation, max_length)
            for each in ([text] if isinstance(text, str) else text)
        ]
        masks = [[1] * len(line) for line in lines]
        if return_tensors:
            return Encoded(
                input_ids=_as_tensors(lines, return_tensors),
                attention_mask=_as_tensors(masks, return_tensors),
            )
        return Encoded(input_ids=lines[0] if single else lines, attention_mask=masks[0] if single else masks)

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of token ids."""
        if clean_up_tokenization_spaces:
            raise TokenizerError("clean_up_tokenization_spaces is not supported: texts stay as they are")
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        listed = [ids] if isinstance(ids, int) else list(ids)
        return self._tokenizer.decode(listed, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        """The texts of several lists of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, by name."""
        return self.convert_ids_to_tokens(self._ids(text, None, False))

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Names of tokens; a single name for a single id."""
        names = self._tokenizer.backend.id_to_token
        if isinstance(ids, int):
            return names(ids)
        hidden = self._tokenizer.special_ids if skip_special_tokens else ()
        return [names(int(token)) for token in ids if int(token) not in hidden]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of names; for an unknown name None, or the id of the unknown token if there is one."""
        if isinstance(tokens, str):
            found = self._tokenizer.token_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def _ids(self, text: str, text_pair: str | None, add_special_tokens: bool) -> list[int]:
        if text_pair is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode_pair(text, text_pair, add_special_tokens=add_special_tokens)

    def _cut_ids(self, text: str, text_pair: str | None, add_special_tokens: bool, longest: int) -> list[int]:
        """Truncates texts, but keeps the special tokens around them."""
        length, cutting = self._cutting
        if length != longest:
            # A copy: the limit would become state of the model's tokenizer, which prompts use.
            cutting = copy.deepcopy(self._tokenizer.backend)
            cutting.enable_truncation(longest)
            self._cutting = longest, cutting
        given = (text,) if text_pair is None else (text, text_pair)
        ids: list[int] = cutting.encode(*given, add_special_tokens=add_special_tokens).ids
        return ids

    # -- conversations -----------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return self._tokenizer.chat_template

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """One conversation or several, as the template writes them; further keywords reach the template."""
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        texts = [
            self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            for messages in (conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        lines = [self._ids(text, None, False) for text in texts]
        found: Any = _as_tensors(lines, return_tensors) if return_tensors else lines if several else lines[0]
        if not return_dict:
            return found
        masks = [[1] * len(line) for line in lines]
        mask: Any = _as_tensors(masks, return_tensors) if return_tensors else masks if several else masks[0]
        return Encoded(input_ids=found, attention_mask=mask)

    # -- the vocabulary ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids, without added tokens."""
        return self._tokenizer.backend.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """All tokens with their ids."""
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    @property
    def vocab(self) -> dict[str, int]:
        """All tokens with their ids."""
        return self.get_vocab()

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by role."""
        return {name: self._tokenizer.special_tokens[name] for name in _SPECIAL if self._has(name)}

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of special tokens that have a role; other markup has none."""
        named = [getattr(self, f"{name}_id") for name in self.special_tokens_map]
        return list(dict.fromkeys(token for token in named if token is not None))

    @property
    def all_special_tokens(self) -> list[str]:
        """Names of special tokens that have a role."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    def _has(self, name: str) -> bool:
        return name in self._tokenizer.special_tokens

    def __getattr__(self, name: str) -> Any:
        """`eos_token`, `eos_token_id` and the like; None if the model has none."""
        token = name.removesuffix("_id")
        if token in _SPECIAL:
            found = self._tokenizer.special_tokens.get(token)
            return self._tokenizer.token_id(found) if name.endswith("_id") else found
        raise AttributeError(f"{type(self).__name__} has no {name}: use transformers.AutoTokenizer for it")


class Encoded(dict[str, Any]):
    """The result of calling a tokenizer; fields are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"there is no {name}, only {', '.join(self)}")
        return self[name]


def _as_tensors(lines: list[list[int]], kind: str) -> Any:
    if kind not in ("pt", "np"):
        raise TokenizerError(f"return_tensors must be pt or np, not {kind!r}")
    if len({len(line) for line in lines}) > 1:
        raise TokenizerError("texts of different lengths cannot be one tensor: padding is not supported")
    if kind == "np":
        import numpy as np

        return np.array(lines)
    import torch

    return torch.tensor(lines)
