"""Who may ask: the right key, and on a loopback address the right name of this machine.

A page in a browser can have its own name resolve to 127.0.0.1 (DNS rebinding) and then talk to whatever listens there;
its requests carry the page's name in `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress

from ullage.serve.request import RefusalError

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Checks every request before anything else reads it."""

    def __init__(self, host: str, api_key: str | None) -> None:
        self._names = LOCAL_NAMES | {host} if is_loopback(host) else None
        self._key = None if api_key is None else api_key.encode()

    def check(self, host: str | None, authorization: str | None) -> None:
        """RefusalError for a request that has no business here."""
        if self._names is not None and _name_of(host) not in self._names:
            raise RefusalError(403, f"Host {host!r} is not a name of this server", code="wrong_host")
        if self._key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        # Latin-1, as headers are; compared in constant time.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            raise RefusalError(
                401,
                "wrong API key" if authorization else "this server needs an API key: Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _name_of(host: str | None) -> str | None:
    """`localhost:8000` -> `localhost`, `[::1]:8000` -> `::1`."""
    if host is None:
        return None
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
