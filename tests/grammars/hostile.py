"""Grammars that do the library, and whoever shares a process with it, harm."""

from typing import Any

NEVER_MASKS = 'root ::= (root ""? | "" root{2} [a-]* | [0-9]{1,9}){2,34} | ""?'
"""Ambiguous without end: each digit multiplies what it may be a part of."""
CRASHING = (
    'root ::= "a0"+ root\nr0 ::= r0{30}',
    'root ::= "a" r0\nr0 ::= r0{2,}',
    'root ::= "a"\nr0 ::= r0{30}',
    "root ::= root{30}",
)
"""Each ends the library with a segmentation fault; those that a later version takes may go."""


def never_compiles(number: int) -> dict[str, Any]:
    """A schema that takes most of a minute; another one for each number."""
    patterns = [f"((a|b?){{0,{990 - at}}}c?){{0,{900 + number}}}" for at in range(60)]
    properties = {f"p{at}": {"type": "string", "pattern": pattern} for at, pattern in enumerate(patterns)}
    return {"type": "object", "properties": properties}
