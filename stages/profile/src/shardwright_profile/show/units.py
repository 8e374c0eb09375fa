"""Numbers with their units, for people."""

__all__ = ["bytes_text", "rate_text", "seconds_text"]


def bytes_text(count: float) -> str:
    """A number of bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def seconds_text(time_s: float) -> str:
    """A time in the unit that leaves one to three digits before the point."""
    if time_s < 1e-3:
        return f"{time_s * 1e6:.3g} us"
    return f"{time_s * 1e3:.3g} ms" if time_s < 1 else f"{time_s:.3g} s"


def rate_text(bytes_per_s: float) -> str:
    """A rate in decimal megabytes or gigabytes a second."""
    return f"{bytes_per_s / 1e6:.3g} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.3g} GB/s"
