"""The process groups of ranks that exchange messages (only the ranks of a sweep import this)."""

import torch.distributed as dist

from shardwright_profile.hardware.message_kinds import Groups

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """This rank's process groups, each made when it is first asked for."""

    def __init__(self) -> None:
        self._mine: dict[Groups, dist.ProcessGroup | None] = {}

    def mine(self, groups: Groups) -> dist.ProcessGroup | None:
        """The one of `groups` that this rank is in, or None; all ranks of the world ask in the same order."""
        if groups not in self._mine:
            made = {group: dist.new_group(list(group)) for group in groups}
            inside = [process_group for group, process_group in made.items() if dist.get_rank() in group]
            self._mine[groups] = inside[0] if inside else None
        return self._mine[groups]
