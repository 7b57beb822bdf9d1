"""Whose request this is: the key it came with, as far as that matters behind the check of keys.

What one tenant has asked must not show in another's answers or times, so their requests share no cached
prefixes: the tenant's name is part of every salt.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

NOBODY = ""
"""The tenant where keys are not told apart."""
current_tenant: ContextVar[str] = ContextVar("current_tenant", default=NOBODY)


def tenant_of(key: bytes) -> str:
    """Returns the name of a key's tenant, which does not tell the key."""
    return hashlib.blake2b(key, digest_size=12, person=b"ostinato-tenant").hexdigest()


def salted(cache_salt: str | None) -> str | None:
    """Returns the salt of a request of the current tenant, from the one that it gave itself."""
    tenant = current_tenant.get()
    return cache_salt if tenant == NOBODY else f"{tenant}\x1f{cache_salt or ''}"
