"""What the proxies in the user's environment have to do with this machine: nothing.

A company's proxy can't reach this machine from outside. A request for a loopback address that goes to the proxy is
refused, or answered by a server of that name there. So no client asks a proxy for this machine: neither those of
`http_clients`, nor those of the programs that a run starts, which inherit `exempt_this_machine`.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping

PROXIES = ("http_proxy", "https_proxy", "all_proxy")  # variables; in capitals, too
EXEMPT = ("no_proxy", "NO_PROXY")  # of both, Python, curl and Go prefer the first
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


def reaches_this_machine(host: str) -> bool:
    """Return True if a host name or address reaches this machine, and through a proxy that of the proxy."""
    name = host.lower().rstrip(".")
    if name in LOCAL_NAMES or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        try:  # 127.1, 2130706433 and the like
            address = ipaddress.ip_address(socket.inet_aton(name))
        except OSError:
            return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


def exempt_this_machine(environment: Mapping[str, str] = os.environ, *, always: bool = False) -> dict[str, str]:
    """The variables that keep the clients of a program from asking a proxy for this machine, beside the addresses that
    the environment exempts already. Empty if the environment names no proxy: with `no_proxy` alone, Python ignores the
    proxies of macOS's settings.

    Args:
        environment: of the program; by default that of this process, which programs inherit.
        always: the program may get a proxy from elsewhere, such as the settings of docker.
    """
    if not always and not named_proxies(environment):
        return {}
    variables = {}
    for name, other in (EXEMPT, EXEMPT[::-1]):
        named = environment.get(name) or environment.get(other) or ""
        listed = [part.strip() for part in named.split(",") if part.strip()]
        if "*" not in listed:
            listed += [address for address in THIS_MACHINE if address not in listed]
        variables[name] = ",".join(listed)
    return variables


def named_proxies(environment: Mapping[str, str]) -> list[str]:
    """The variables that name a proxy."""
    names: list[str] = []
    for name in PROXIES:
        names += [name, name.upper()]
    return [name for name in names if environment.get(name)]
