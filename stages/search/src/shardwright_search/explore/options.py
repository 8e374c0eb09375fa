"""The options of `shardwright explore`."""

from typing import Annotated

from msgspec import Meta

from shardwright.command import POSITIONAL, Options


class ExploreOptions(Options, frozen=True, kw_only=True):
    """Serve a page on this machine on which model, GPUs, batch, length, system and budget are changed and searched.

    The address that is printed has a token and is for this machine alone; Ctrl-C ends it.
    """

    link: Annotated[str | None, POSITIONAL] = None
    """Address of somebody else's page, or what stands behind its question mark: its settings are taken."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port; 0: a free one."""
