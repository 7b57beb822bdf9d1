"""Whose request this is: a key's, or without keys an address's.

Tenants share the server by weighted fair shares (`fair_queue.py`). What one of them has asked must not show
in another's answers or times, so requests with different keys share no cached prefixes: the name of the key
is part of every salt.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address

from .quotas import Limits, Quota

LOOPBACK = "loopback"
MOST_ADDRESSES = 4096
"""Addresses that are told apart at a time."""


class TenantCounts:
    """What a tenant has used; addresses are counted together."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.refused: Counter[str] = Counter()
        """Requests that were refused, by reason."""


class Tenant:
    """One of those who share the server."""

    def __init__(
        self, name: str, *, label: str = "", counts: TenantCounts | None = None, weight: float = 1.0
    ) -> None:
        """`label`: its name in metrics; empty: it is counted with others, in `counts`."""
        self.name, self.label = name, label
        self.weight = weight
        self.salt = ""
        """In the salts of its prefixes; empty: it shares them."""
        self.counts = counts or TenantCounts()
        self.quota = Quota(label or name, Limits())
        self.num_unfinished = 0
        """Engine requests whose end has not come yet."""

    def take_prompt(self, tokens: int, completions: int) -> None:
        """Charge a request for its prompts; 429 or 400 if its quota does not allow that."""
        self.quota.take_prompt(tokens, completions)
        self.counts.prompt_tokens += tokens

    def take_token(self) -> None:
        """Charge a token that was generated."""
        self.quota.take_token()
        self.counts.generation_tokens += 1


class AddressTenants:
    """Tenants by the address that they come from."""

    def __init__(self) -> None:
        self.counts = TenantCounts()
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()

    def of(self, host: str) -> Tenant:
        """Returns the tenant of an address; one that has many IPv6 addresses is one tenant."""
        name = f"@{counted_address(host)}"
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, counts=self.counts)
            self._forget()
        self._tenants.move_to_end(name)
        return tenant

    def _forget(self) -> None:
        for name in list(self._tenants)[: len(self._tenants) - MOST_ADDRESSES]:
            if not self._tenants[name].num_unfinished:
                del self._tenants[name]


def counted_address(host: str) -> str:
    """Returns what clients are told apart by: the address, or the network of an IPv6 address, which has as
    many addresses as its owner likes. All loopback addresses are one."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            network = str(IPv6Address(int(address) >> 64 << 64))
            return LOOPBACK if address.is_loopback else network
        address = address.ipv4_mapped
    return LOOPBACK if address.is_loopback else str(address)


NOBODY = Tenant("")
"""The tenant of what no client has asked for."""
current_tenant: ContextVar[Tenant] = ContextVar("current_tenant", default=NOBODY)
current_key: ContextVar[bytes] = ContextVar("current_key", default=b"")
"""The SHA-256 of the key that a request came with; empty: it needed none."""


def salted(cache_salt: str | None) -> str | None:
    """Returns the salt of a request of the current tenant, from the one that it gave itself."""
    salt = current_tenant.get().salt
    return cache_salt if not salt else f"{salt}\x1f{cache_salt or ''}"
