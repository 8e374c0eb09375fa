"""A plan's optimizer and gradient clipping over parameters on different device meshes.

A gradient g is clipped by c = min(1, limit / (|g| + 1e-6)). The norm |g| is over all parameters of the model: each
rank adds up the squares of its shards, divided by the number of ranks that hold the same shard, and one all-reduce sums
them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwright.optimizers.registry import OPTIMIZERS
from shardwright_train.engine.homes import Held
from shardwright_train.engine.host import LateUpdates, States, host_of
from shardwright_train.engine.learning_rate import Hyperparameters, ParameterGroup, group_of
from shardwright_train.engine.updates import UPDATES, initial_states, moved_states, tensors_of
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.experts import RouterBiases
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import peak_memory_bytes
from shardwright_train.torch_private import foreach_mul_, foreach_norm, step_unless


class ShardedOptimizer:
    """A plan's optimizer on each rank's shards.

    The update needs no mesh: it runs over plain local tensors, which share memory with the DTensors. To update
    `matrices` it may need the parts that other ranks of the stage hold. Norms and biases are not decayed unless an
    option requests it; a parameter's learning rate is the step's learning rate times the parameter's factor. Decay and
    factor depend on its name in the stock model (`stock_names` for tied parameters), so that all replicas are in the
    same group. `replicas` are tied copies that do not count in the norm, because their owner does. Frozen parameters
    have no states; `router_biases` are corrected by counts instead. The states start at zero, and bias correction
    continues after `updates` steps.

    The states of `offloaded` parameters, by layer, stay in host memory. The parameters `on_host` among them are updated
    by the host at the end of a step, on copies of gradients and parameters; the updates of the others wait in `late`,
    with their gradients, for their layer's next use. `depths`: for how many further tokens a step has losses.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        settings: Hyperparameters,
        replicas: frozenset[str] = frozenset(),
        updates: int = 0,
        stock_names: Mapping[str, str] | None = None,
        router_biases: RouterBiases | None = None,
        optimizer: str = "adamw",
        groups: Groups | None = None,
        matrices: Mapping[str, Held] | None = None,
        offloaded: Mapping[str, Sequence[str]] | None = None,
        on_host: Set[str] = frozenset(),
        late: LateUpdates | None = None,
        depths: int = 0,
    ) -> None:
        self._depths = depths
        self._router_biases = router_biases
        self.parameters, self.settings = parameters, settings
        self._trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._counted = [parameter for name, parameter in self._trained.items() if name not in replicas]
        self._local = {name: nn.Parameter(local_tensor(p.detach())) for name, p in self._trained.items()}
        device = local_tensor(next(iter(parameters.values()))).device
        self.host = host_of(device)
        self._there = {
            name: nn.Parameter(self.host.kept(x.detach())) for name, x in self._local.items() if name in on_host
        }
        """Copies in host memory of the parameters that the host updates."""
        asked, names = (settings.learning_rate_factors, settings.decay_norms_and_biases), stock_names or {}
        group_by_name = {name: group_of(names.get(name, name), p.dim(), *asked) for name, p in self._trained.items()}

        def rule_of(members: Iterable[str]) -> torch.optim.Optimizer:
            given = _groups(settings, {name: group_by_name[name] for name in members}, self._local | self._there)
            return UPDATES[optimizer](given, settings)

        layers = {
            layer: [name for name in names if name in self._trained] for layer, names in (offloaded or {}).items()
        }
        self._offloaded = {name: rule_of([name]) for names in layers.values() for name in names}
        """The optimizers of parameters whose states are in host memory, one for each."""
        self._rule = rule_of(name for name in self._trained if name not in self._offloaded)
        self.streamed = {
            layer: streamed for layer, names in layers.items() if (streamed := [n for n in names if n not in on_host])
        }
        """The parameters whose states are copied to the device for their updates, by layer."""
        self._late = LateUpdates(tuple(self.streamed)) if late is None else late
        replicas_of = [_replicas(parameter) for parameter in self._counted]
        self._replicas = torch.tensor(replicas_of, dtype=torch.float64, device=device)
        for name, local in self._local.items():
            given_of = self._trained[name], local.detach(), updates, groups, (matrices or {}).get(name)
            states = initial_states(OPTIMIZERS[optimizer], *given_of)
            if name in self._offloaded:
                states |= {key: self.host.kept(x) for key, x in moved_states(states).items()}
            self._states_of(name).update(states)

    def step(self, step: int, loss: Tensor, stop: bool, loss_scale: float = 1.0, save: bool = False) -> "StepOutcome":
        """Clip by the global norm, update, and free the gradients; `step` counts from 1.

        The gradients belong to `loss_scale` times the loss. One all_reduce over the world carries the squared norm,
        the losses of `run_step`, whether any rank wants to stop or to save, and each rank's peak memory so far. If
        loss or norm is not finite, nothing is updated. Parameters whose states come from the host are updated later.
        """
        self._late.flush()
        squares, losses = self._squared_norm(), loss.reshape(-1)
        # `full_like` passes its value with the kernel launch; copying a tensor from the host would wait for the device.
        asked = (torch.full_like(squares, float(wish)) for wish in (stop, save))
        shared = torch.cat([torch.stack([losses[0], squares, *asked]), losses[1:], self._peaks()])
        dist.all_reduce(shared)
        learning_rate = self.settings.learning_rate_at(step)
        self._update(shared, learning_rate, loss_scale)
        if self._router_biases is not None:
            rate = self.settings.router_bias_update_rate * shared[:2].isfinite().all()
            self._router_biases.correct(shared[5 + self._depths : 3 + len(losses)], rate)
        self.forget_gradients()
        if self.streamed:
            self.host.begin([states for layer in self.streamed for states in self.streamed_states(layer)])
            self._late.wait_for_use(self, self.streamed)
        # The only time in a step that the host waits for the device: whatever it needs to know is in this one tensor.
        mean_loss, squared, stops, saves, *rest = shared.tolist()
        others, peaks = rest[: len(losses) - 1], tuple(map(int, rest[len(losses) - 1 :]))
        mtp_losses, of_blocks = tuple(others[: self._depths]), others[self._depths :]
        auxiliary, assignments = (of_blocks[0] if of_blocks else None), tuple(of_blocks[1:])
        norm = math.sqrt(squared) / loss_scale if squared >= 0 else math.nan
        asked_for = stops > 0, saves > 0
        return StepOutcome(mean_loss, norm, learning_rate, *asked_for, peaks, auxiliary, assignments, mtp_losses)

    def forget_gradients(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def flush(self) -> None:
        """Finish the updates that wait, and wait until host memory has their states."""
        self._late.flush()
        self.host.settle()

    def state(self) -> dict[str, Tensor]:
        """Return the states as DTensors with their parameters' layout, under `optim.<parameter>.<state>`."""
        self.flush()
        kept = {name: tensors_of(p, self._states_of(name)) for name, p in self._trained.items()}
        return {f"optim.{name}.{state}": x for name, states in kept.items() for state, x in states.items()}

    @property
    def parameter_bytes(self) -> int:
        """The bytes of this rank's shards of parameters."""
        return sum(local_tensor(p).nbytes for p in self.parameters.values())

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that exist now."""
        return sum(local_tensor(p.grad).nbytes for p in self.parameters.values() if p.grad is not None)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the optimizer states on this rank's device."""
        return sum(
            x.nbytes for name in self._trained if name not in self._offloaded for x in self._moved(name).values()
        )

    @property
    def host_states(self) -> tuple[States, ...]:
        """The tensors in host memory for each parameter: states, and the parameter itself if the host updates it."""
        there = ({"parameter": self._there[name].detach()} if name in self._there else {} for name in self._offloaded)
        return tuple(self._moved(name) | copy for name, copy in zip(self._offloaded, there, strict=True))

    def streamed_states(self, layer: str) -> tuple[States, ...]:
        """Return the states of a layer that are copied to the device, by parameter in the order of their updates."""
        return tuple(self._moved(name) for name in self.streamed[layer])

    def _moved(self, name: str) -> States:
        return moved_states(self._states_of(name))

    def _states_of(self, name: str) -> dict[str, Any]:
        states: dict[str, Any] = self._offloaded.get(name, self._rule).state[self._there.get(name, self._local[name])]
        return states

    def _peaks(self) -> Tensor:
        """Return a tensor with this rank's peak memory at its index, 0 for other ranks; float64 is exact here."""
        device = self._replicas.device
        peaks = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
        peaks[dist.get_rank()].fill_(float(peak_memory_bytes(device)))
        return peaks

    def _squared_norm(self) -> Tensor:
        """Return this rank's part of the squared norm of all gradients; the sum over all ranks is the whole."""
        gradients = [local_tensor(p.grad) for p in self._counted if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._replicas.device)
        # Each norm in at least 32 bits, whatever the gradients' format; the squares are added in 64 bits.
        norms = torch.stack(foreach_norm(gradients, 2, torch.promote_types(gradients[0].dtype, torch.float32))).double()
        return (norms.square() / self._replicas).sum()

    def _update(self, shared: Tensor, learning_rate: float, loss_scale: float) -> None:
        """Update the parameters, unless loss or squared norm (the first two of `shared`) is not finite.

        The device decides that, without a wait of the host.
        """
        limit, gradients = self.settings.clip_norm, []
        if not self._trained:
            return
        for name, parameter in self._trained.items():
            assert parameter.grad is not None
            gradients.append(local_tensor(parameter.grad))
            self._local[name].grad = gradients[-1]
        divisor = None
        if limit > 0 or loss_scale != 1.0:
            norm = shared[1].sqrt() / loss_scale
            scale = (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)
            # The fused update divides gradients by a float32 tensor, which would round float64 ones.
            if gradients[0].dtype is torch.float64:
                foreach_mul_(gradients, scale / loss_scale)
            else:
                divisor = (loss_scale / scale).float()
        forbidden = 1.0 - shared[:2].isfinite().all().float()
        for rule in (self._rule, *self._offloaded.values()):
            for group in rule.param_groups:
                group["lr"] = learning_rate * group["factor"]
        step_unless(self._rule, forbidden, divisor)
        self._update_there(forbidden, divisor)
        self._decided = forbidden, divisor
        waiting = {name for names in self.streamed.values() for name in names}
        for name, local in self._local.items():
            if name not in waiting:
                local.grad = None

    def start_updates(self, layer: str) -> None:
        """Start to update the parameters of a layer as the step has decided, with copies of their states."""
        names = self.streamed[layer]

        def update(number: int, copies: States) -> None:
            states, kept = self._states_of(names[number]), self._moved(names[number])
            states.update(copies)
            step_unless(self._offloaded[names[number]], *self._decided)
            states.update(kept)

        self.host.start(layer, self.streamed_states(layer), update)

    def finish_updates(self, layer: str) -> None:
        """Make the device wait for the updates of a layer, and free their gradients."""
        self.host.wait(layer)
        for name in self.streamed[layer]:
            self._local[name].grad = None

    def end_updates(self) -> None:
        """Free the buffers through which states were copied."""
        self.host.end()

    def _update_there(self, forbidden: Tensor, divisor: Tensor | None) -> None:
        """Update on the host the parameters that it updates, after waiting for their gradients."""
        if not self._there:
            return
        forbidden, divisor = forbidden.cpu(), None if divisor is None else divisor.cpu()
        for name, there in self._there.items():
            here = self._local[name]
            assert here.grad is not None
            with torch.no_grad():
                there.copy_(here)
            there.grad = here.grad.to(there.device, copy=True)
            step_unless(self._offloaded[name], forbidden, divisor)
            there.grad = None
            with torch.no_grad():
                here.copy_(there)


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, the same on every rank."""

    loss: float
    """Mean cross entropy over the tokens of the step, plus the weighted losses of further tokens and auxiliary losses.
    """
    grad_norm: float
    learning_rate: float
    stop: bool
    """Whether some rank was asked to stop."""
    save: bool
    """Whether some rank finds a checkpoint due."""
    peak_memory_bytes: tuple[int, ...]
    """Peak memory of each rank so far, in bytes: on a GPU of the device's tensors, on CPU of the process."""
    auxiliary_loss: float | None = None
    """The part of the loss that comes from blocks' auxiliary losses, averaged over samples; None without any."""
    assignments: tuple[float, ...] = ()
    """How often each expert of each layer was chosen, in order, times the number of ranks with the same positions."""
    mtp_losses: tuple[float, ...] = ()
    """Mean cross entropy of each depth that predicts further tokens."""

    @property
    def finite(self) -> bool:
        """Return whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def _groups(
    settings: Hyperparameters, group_by_name: Mapping[str, ParameterGroup], local: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer; one empty group if there are no parameters."""
    by_group = defaultdict[ParameterGroup, list[nn.Parameter]](list)
    for name, group in group_by_name.items():
        by_group[group].append(local[name])
    return [
        {
            "params": members,
            "lr": settings.learning_rate,
            "weight_decay": settings.weight_decay * group.decays,
            "factor": group.factor,
        }
        for group, members in (by_group or {ParameterGroup(decays=False, factor=1.0): []}).items()
    ]


def _replicas(parameter: Tensor) -> int:
    """Return the number of ranks that hold each element of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(axis) for axis, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)
    )
