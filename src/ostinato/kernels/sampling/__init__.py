"""From logits to tokens.

| | plain requests | those that ask for more |
|---|---|---|
| what they ask for | `plain.PlainSettings` | `asked` |
| on any device | `plain` | `asking_rows` |
| on a GPU | `triton_draw`, `triton_return` | `triton_adjusted`, `filters`, `triton_draw`, `triton_amend` |

`torch_reference` is the definition of it all; tokens come back in `token_lines`.
"""
