"""From logits to tokens.

| | plain requests | those that ask for more |
|---|---|---|
| what they ask for | `torch_reference.PlainSettings` | `asked` |
| on any device | `torch_reference.return_plain` | `asking_rows` |
| on a GPU | `triton_draw`, `triton_best` | `triton_adjusted`, `filters`, `triton_draw`, `triton_amend` |

`torch_reference` is the definition of it all; tokens come back in `token_lines`.
"""
