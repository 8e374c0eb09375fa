"""How messages between pipeline stages are sent."""

from enum import StrEnum


class Sends(StrEnum):
    """Who waits for a message."""

    ASYNCHRONOUS = "asynchronous"
    """As this runtime does: receives are posted ahead, and nobody waits for a send."""
    BLOCKING = "blocking"
    """As Megatron-LM and torch's stock 1F1B do: a pass's send and the next one's receive together, both waited for."""
