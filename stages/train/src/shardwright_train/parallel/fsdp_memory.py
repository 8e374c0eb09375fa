"""What FSDP2 holds of a module beside the stored parameters and their reduced gradients."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

__all__ = ["gathered_parameters", "unreduced_gradients"]


def gathered_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Memory of the copies of parameters that the modules in `module` compute with; empty once given back."""
    for parameter in _parameters(module):
        yield from parameter.all_gather_outputs


def unreduced_gradients(module: nn.Module) -> Iterator[Tensor]:
    """Gradients of parameters that are whole, for compute or always, that wait for their reduction.

    FSDP2 keeps them in the type they are reduced in; where that is the type of compute they stay where autograd put
    them.
    """
    for own in module.parameters():
        if not isinstance(own, DTensor) and own.grad is not None:
            yield own.grad
    for parameter in _parameters(module):
        if parameter.unsharded_accumulated_grad is not None:
            yield parameter.unsharded_accumulated_grad
        gathered = getattr(parameter, "_unsharded_param", None)  # made by the first gathering
        if gathered is not None and gathered.grad is not None:
            yield gathered.grad


def _parameters(module: nn.Module) -> Iterator[FSDPParam]:
    # FSDP2 has no public names for these; a test compares them with what the shapes say.
    for part in module.modules():
        if isinstance(part, FSDPModule):
            group = part._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield from group.fsdp_params
