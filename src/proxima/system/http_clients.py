"""Clients of HTTP servers: none asks a proxy for this machine, see `proxies`."""

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx

from proxima.data.errors import UserError
from proxima.system.proxies import named_proxies, reaches_this_machine

Client = TypeVar("Client", httpx.Client, httpx.AsyncClient)


def http_client(url: str, *, proxied: bool = False, **options: Any) -> httpx.Client:
    """A client for the server at `url`.

    Args:
        proxied: use the proxy in the environment, unless `url` is of this machine.
        options: of `httpx.Client`, without `trust_env` and `proxy`.

    Raises:
        UserError: httpx can't use the proxy; the message names its variable.
    """
    return _client(httpx.Client, url, proxied, options)


def async_http_client(url: str, *, proxied: bool = False, **options: Any) -> httpx.AsyncClient:
    """`http_client`, of asyncio."""
    return _client(httpx.AsyncClient, url, proxied, options)


def _client(kind: Callable[..., Client], url: str, proxied: bool, options: Mapping[str, Any]) -> Client:
    if not proxied or reaches_this_machine(httpx.URL(url).host):
        return kind(trust_env=False, **options)
    try:
        return kind(trust_env=True, **options)
    except ImportError:
        variables = [name for name in named_proxies(os.environ) if os.environ[name].startswith("socks")]
        remedy = f"pip install 'httpx[socks]', or unset {' and '.join(variables)}"
        raise UserError(f"{', '.join(variables)}: a SOCKS proxy needs the package socksio", remedy=remedy) from None
    except (ValueError, httpx.InvalidURL) as error:  # a scheme that is not one of a proxy, or no address
        variables = named_proxies(os.environ)
        raise UserError(f"{', '.join(variables)}: {error}", remedy="correct the proxy's address, or unset it") from None
