"""Which parameters of blocks are matrices, by the classes of stock models; and each is whole at one rank, once."""

from itertools import pairwise, product

import pytest
import torch
from tiny_models import CONFIGS, stock_model, tiny

from shardwright.optimizers.registry import iteration_flops, largest_flops, matrix_dims, update_flops
from shardwright.types import Parameter
from shardwright_train.engine.homes import Held, Homes, orthogonalized
from shardwright_train.models.base import family_named

_OTHER_CLASSES = ("Norm", "Embedding", "PositionBias")


@pytest.mark.parametrize("family", CONFIGS)
def test_matrices_are_what_stock_blocks_multiply_with(family: str) -> None:
    model, facts = tiny(family), family_named(family, "test")
    with torch.device("meta"):
        modules = dict(stock_model(model).named_modules())
    found = 0
    for number in range(len(model.layers)):
        for parameter in model.type_of(f"layers[{number}]").parameters:
            name, _ = facts.file_name(facts.owner_name(model, f"layers[{number}]", parameter.name))
            kind = type(modules[name.rpartition(".")[0]]).__name__
            others = name.endswith("bias") or kind.endswith(_OTHER_CLASSES)
            is_matrix = len(parameter.shape) > 1 and not others
            assert (matrix_dims(parameter) is not None) == is_matrix, (name, kind)
            found += is_matrix
    assert found >= len(model.layers)


@pytest.mark.parametrize(
    ("parameter", "dims"),
    [
        (Parameter(name="q.weight", shape=(8, 6), tp_dim=0), (0, 1)),
        (Parameter(name="c_attn.weight", shape=(6, 3, 8), tp_dim=2), (0, 2)),
        (Parameter(name="experts.up", shape=(5, 2, 8, 6), tp_dim=2, ep_dim=0), (2, 3)),
        (Parameter(name="experts.up", shape=(5, 6, 2, 8), tp_dim=3, ep_dim=0), (1, 3)),
        (Parameter(name="experts.bias", shape=(5, 8), ep_dim=0), None),
        (Parameter(name="conv.weight", shape=(8, 3, 2, 2)), None),
        (Parameter(name="q.weight", shape=(8, 6), frozen=True), None),
    ],
)
def test_experts_and_fused_parts_are_matrices_by_themselves(parameter: Parameter, dims: tuple[int, int] | None) -> None:
    assert matrix_dims(parameter) == dims
    one = iteration_flops(8, 6)
    assert one == 5 * (4 * 36 * 8 + 2 * 216)
    stacked = {2: 1, 3: 3, 4: 10}[len(parameter.shape)] if dims else 0
    assert update_flops([parameter]) == stacked * one
    assert largest_flops([parameter]) == bool(dims) * one


def test_homes_share_the_work_and_each_is_home_to_one_matrix_at_a_time() -> None:
    """Experts on two groups of ranks, rows of others on four: whatever a rank lacks comes to it once."""
    rows = tuple(((2 * rank, 2 * rank + 2), (0, 6)) for rank in range(4))
    experts = tuple(
        ((2 * (rank // 2), 2 * (rank // 2) + 2), (0, 8), (3 * (rank % 2), 3 * (rank % 2) + 3)) for rank in range(4)
    )
    held = [Held((8, 6), (0, 1), rows)] * 8 + [Held((4, 8, 6), (1, 2), experts)] * 2
    ranks = [Homes([each._replace(me=me) for each in held])._turns for me in range(4)]
    assert [len(turns) for turns in ranks] == [4] * 4
    for turn in zip(*ranks, strict=True):
        assert [each.mine for each in turn] == [(8, 6)] * 4
        for leg in ("there", "back"):
            legs = [getattr(each, leg) for each in turn]
            for source, target in product(range(4), repeat=2):
                assert legs[source].sent_numel[target] == legs[target].came_numel[source]
        for home, each in enumerate(turn):
            parts = sorted((part.rows.start, part.columns.start, part.numel) for part in each.there.came)
            assert sum(numel for *_, numel in parts) == 48, home
            assert all(a[:2] < b[:2] for a, b in pairwise(parts))


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (12, 12)])
def test_the_iteration_is_pytorchs_to_the_bit(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = x.clone()
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    scale = 0.2 * max(shape) ** 0.5
    assert torch.equal(weight, torch.zeros(shape).add_(orthogonalized(x.bfloat16()), alpha=-scale))
