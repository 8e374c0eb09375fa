from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.estimate.settings import Grid, ProfileSettings, Range
from shardwright.io import BadInput, read_document, write_document
from shardwright.types import RECOMPUTE_WHOLE, DataParallel, Plans, Recompute, SequenceParallel
from shardwright_profile.model.probes import make_probes, with_layers


def _subsets(values: list[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


def _settings(**changed: Any) -> ProfileSettings:
    usual: dict[str, Any] = {
        "tp_sizes": (1,),
        "sequence_parallel": (SequenceParallel.NONE,),
        "recompute": (Recompute.NONE,),
        "micro_batch_sizes": (1, 2, 4),
    }
    return ProfileSettings(**(usual | changed))


_SETTINGS = st.builds(
    ProfileSettings,
    tp_sizes=_subsets([1, 2, 3, 4, 8]).map(lambda sizes: tuple({1, *sizes})),
    sequence_parallel=_subsets(list(SequenceParallel)),
    recompute=_subsets(list(RECOMPUTE_WHOLE)).map(lambda kinds: tuple({Recompute.NONE, *kinds})),
    micro_batch_sizes=_subsets([1, 2, 4]),
    layers=st.sampled_from([(1, 2), (1, 3), (2, 5)]),
    compile=st.booleans(),
)
_LAYERS = st.lists(st.sampled_from(["block", "other"]), min_size=1, max_size=6)


@given(settings=_SETTINGS, layers=_LAYERS, devices=st.sampled_from([1, 2, 4, 8]))
def test_probes_cover_each_fitting_strategy_once_and_nothing_else(make_model, make_cluster, settings, layers, devices):
    model = make_model(layers)
    made = make_probes([model], make_cluster((3, devices)), f"cpu-{devices}", settings)
    strategies = {
        (tp_size, kind if tp_size > 1 else SequenceParallel.NONE)
        for tp_size in settings.tp_sizes
        for kind in settings.sequence_parallel
        if devices % tp_size == 0 and 8 % tp_size == 0
    }
    few, many = settings.layers
    types = set(layers)
    counts = [dict.fromkeys(types, few), *(dict.fromkeys(types, few) | {name: many} for name in types)]
    expected = Counter(
        (strategy, recompute, size, frozenset(count.items()))
        for strategy in strategies
        for recompute in settings.recompute
        for size in settings.micro_batch_sizes
        for count in counts
    )
    found = Counter(
        (
            (plan.layers[0].tp_size, plan.layers[0].sequence_parallel),
            plan.layers[0].recompute,
            plan.microbatch_samples // plan.layers[0].dp_size,
            frozenset(Counter(plan.model.layers).items()),
        )
        for plan in made.plans
        if plan.embedding.data_parallel is DataParallel.DDP
    )
    assert found == expected
    zero = [plan for plan in made.plans if plan.embedding.data_parallel is not DataParallel.DDP]
    widest = devices // min((tp_size for tp_size, _ in strategies), default=devices)
    assert [(str(p.head.data_parallel), p.head.dp_size) for p in zero] == [
        (kind, widest) for kind in ("zero2", "zero3") if widest > 1
    ]


@given(settings=_SETTINGS, layers=_LAYERS, devices=st.sampled_from([1, 2, 4, 8]))
def test_every_probe_is_one_node_one_stage_three_microbatches_of_one_strategy(
    make_model, make_cluster, settings, layers, devices
):
    model = make_model(layers)
    for plan in make_probes([model], make_cluster((3, devices)), f"cpu-{devices}", settings).plans:
        assert plan.world_size == devices
        assert len(plan.stages) == 1
        assert plan.num_microbatches == 3, "the middle one adds to gradients, and neither gathers nor reduces"
        assert plan.compile is settings.compile
        assert plan.model.architecture_sha256 == model.architecture_sha256
        spread = {(s.tp_size, s.dp_size, s.sequence_parallel) for s in (plan.embedding, plan.head, *plan.layers)}
        assert len(spread) == 1
        assert len({s.data_parallel for s in (plan.embedding, plan.head, *plan.layers)}) == 1
        assert all(s.tp_consecutive for s in (plan.embedding, plan.head, *plan.layers))


def test_probes_have_different_names_and_survive_their_file(make_model, make_cluster, tmp_path):
    settings = ProfileSettings(
        tp_sizes=(1, 2),
        sequence_parallel=(SequenceParallel.NONE, SequenceParallel.MEGATRON),
        recompute=(Recompute.NONE, Recompute.FULL),
        micro_batch_sizes=(1, 4),
    )
    plans = make_probes([make_model()], make_cluster((1, 2)), "cpu-2", settings).plans
    assert len({plan.name for plan in plans}) == len(plans) == 3 * 2 * 2 * 2 + 2
    write_document(tmp_path / "probes.json", Plans(plans=plans))
    assert read_document(tmp_path / "probes.json", Plans).plans == plans


def test_truncated_models_keep_the_order_of_their_types(make_model):
    twofold = make_model(("encoder", "encoder", "decoder", "decoder"))
    assert with_layers(twofold, {"encoder": 1, "decoder": 3}).layers == ("encoder", "decoder", "decoder", "decoder")
    assert with_layers(twofold, {"encoder": 3, "decoder": 1}).layers == ("encoder", "encoder", "encoder", "decoder")
    alternating = make_model(("local", "global", "local", "global"))
    assert with_layers(alternating, {"local": 2, "global": 1}).layers == ("local", "global", "local")


def test_a_strategy_that_does_not_fit_is_left_out_with_its_reason(make_model, make_cluster):
    settings = ProfileSettings(
        tp_sizes=(1, 3, 16),
        sequence_parallel=(SequenceParallel.NONE,),
        recompute=(Recompute.NONE,),
        micro_batch_sizes=(1,),
    )
    made = make_probes([make_model()], make_cluster((1, 16)), "cpu-16", settings)
    assert {plan.layers[0].tp_size for plan in made.plans} == {1}
    assert [sentence.split(": ")[1] for sentence in made.left_out] == [
        "tp_size 3 does not divide the 16 devices of the node",
        "tp_size 16 does not divide heads 8",
    ]


def test_layers_are_measured_under_strategies_that_embedding_and_head_do_not_have(make_model, make_cluster):
    settings = _settings(tp_sizes=(1, 2), sequence_parallel=(SequenceParallel.NONE, SequenceParallel.MEGATRON))
    made = make_probes([make_model(whole_ends=True)], make_cluster((1, 4)), "cpu-4", settings)
    shapes = {
        (plan.layers[0].tp_size, plan.embedding.tp_size, plan.head.dp_size, plan.microbatch_samples)
        for plan in made.plans
    }
    assert shapes == {(1, 1, 4, 4), (1, 1, 4, 8), (1, 1, 4, 16), (2, 1, 4, 4), (2, 1, 4, 8)}
    assert [sentence.partition(":")[0] for sentence in made.left_out] == [
        "tp_size=2 sequence_parallel=megatron",  # whose positions would be gathered for embedding and head
        "tp_size=2 sequence_parallel=none micro_batch_size=1",
    ]
    # Nothing would measure embedding and head.
    with pytest.raises(BadInput, match=r"no strategy fits .*tp_size 2 does not divide ends 1"):
        make_probes([make_model(whole_ends=True)], make_cluster((1, 4)), "cpu-4", _settings(tp_sizes=(2,)))


def test_no_fitting_strategy_and_an_unknown_node_type_are_refused(make_model, make_cluster):
    settings = ProfileSettings(
        tp_sizes=(3,), sequence_parallel=(SequenceParallel.NONE,), recompute=(Recompute.NONE,), micro_batch_sizes=(1,)
    )
    with pytest.raises(BadInput, match="no strategy fits"):
        make_probes([make_model()], make_cluster((1, 2)), "cpu-2", settings)
    with pytest.raises(BadInput, match="'gpu' is not one of the cluster's node types: choose from cpu-2"):
        make_probes([make_model()], make_cluster((1, 2)), "gpu", settings)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"layers": (3, 3)}, "two growing numbers"),
        ({"recompute": (Recompute.FULL,)}, "must hold 'none'"),
        ({"tp_sizes": (1, 1)}, "tp_sizes holds a value twice"),
    ],
)
def test_settings_that_cannot_be_fitted_are_refused(changed, problem):
    usual = {
        "tp_sizes": (1,),
        "sequence_parallel": (SequenceParallel.NONE,),
        "recompute": (Recompute.NONE,),
        "micro_batch_sizes": (1,),
    }
    with pytest.raises(ValueError, match=problem):
        ProfileSettings(**(usual | changed))


def test_further_lengths_are_measured_with_the_smallest_micro_batch_alone_or_with_all(make_model, make_cluster):
    models = [make_model(sequence_length=length) for length in (32, 64, 128)]
    for grid, wanted in ((Grid.FEWEST, 3 + 1 + 1), (Grid.FULL, 9)):
        settings = _settings(sequence_lengths=(64, 128), grid=grid)
        plans = make_probes(models, make_cluster((1, 2)), "cpu-2", settings).plans
        points = {(p.model.sequence_length, p.microbatch_samples // p.embedding.dp_size) for p in plans}
        assert len(points) == wanted
        assert {size for length, size in points if length == 32} == {1, 2, 4}


def test_of_a_range_no_more_is_measured_than_a_curve_needs_and_one_point_to_judge_it_by():
    every = Range(min=1, max=32, step=1)
    settings = _settings(micro_batch_sizes=every, sequence_lengths=Range(min=64, max=512, step=64))
    assert settings.sizes(256, model_length=256) == (1, 17, 32)
    assert settings.lengths(model_length=256) == (256, 64, 192, 384, 512)
    full = _settings(micro_batch_sizes=every, sequence_lengths=Range(min=64, max=512, step=64), grid=Grid.FULL)
    assert full.sizes(512, model_length=256) == tuple(range(1, 33))
    assert full.lengths(model_length=256) == (256, 64, 128, 192, 320, 384, 448, 512)


def test_descriptions_at_other_lengths_or_of_other_models_are_refused(make_model, make_cluster):
    settings = _settings(sequence_lengths=(64,))
    with pytest.raises(BadInput, match=r"describe sequence_length \[32\], the settings ask for \[32, 64\]"):
        make_probes([make_model()], make_cluster((1, 2)), "cpu-2", settings)
    other = make_model(("other",), sequence_length=64)
    with pytest.raises(BadInput, match="describe different models"):
        make_probes([make_model(), other], make_cluster((1, 2)), "cpu-2", settings)
