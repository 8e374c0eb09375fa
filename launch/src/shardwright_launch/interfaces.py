"""Network interfaces and names of this machine."""

import fcntl
import socket
from contextlib import suppress

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
_NAME_BYTES, _REQUEST_BYTES, _ADDRESS = 15, 256, slice(20, 24)
_ELSEWHERE = ("198.51.100.1", 9)
"""An address and port of no machine (RFC 5737)."""


def interface_of(address: str) -> str | None:
    """Return the interface that has an IPv4 address, or an address of the loopback network (netdevice(7)).

    Returns None where no interface has it, and for IPv6 addresses other than ::1.
    """
    if _is_loopback(address):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                request = name.encode()[:_NAME_BYTES].ljust(_REQUEST_BYTES, b"\0")
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS]) == address:
                    return name
    return None


def means_loopback(host: str) -> bool:
    """Whether a host name that is not `localhost` resolves to loopback here, as a machine's own name does on Debian."""
    with suppress(OSError):
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        return all(map(_is_loopback, addresses)) and host != "localhost" and host not in addresses
    return False


def name_for_others() -> str:
    """Return this machine's name or, where that resolves to loopback here, the address by which it reaches others."""
    name = socket.gethostname()
    if means_loopback(name):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)  # which sends nothing
            return str(probe.getsockname()[0])
    return name


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
