"""Which ranks work together under a strategy, which part of a batch each holds, and which bytes move."""

from shardwright_formats.placement.layout import (
    Box,
    Layout,
    Rectangle,
    Route,
    closed_groups,
    dp_groups,
    layout_of,
    overlap,
    parameter_box,
    parameter_layout,
    routes,
    sent_elements,
    tp_groups,
)
from shardwright_formats.placement.traffic import (
    Cause,
    Message,
    loss_messages,
    parameter_messages,
    partial_gradient_bytes,
    redistribution_messages,
    region_messages,
)

__all__ = [
    "Box",
    "Cause",
    "Layout",
    "Message",
    "Rectangle",
    "Route",
    "closed_groups",
    "dp_groups",
    "layout_of",
    "loss_messages",
    "overlap",
    "parameter_box",
    "parameter_layout",
    "parameter_messages",
    "partial_gradient_bytes",
    "redistribution_messages",
    "region_messages",
    "routes",
    "sent_elements",
    "tp_groups",
]
