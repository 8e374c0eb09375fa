"""The pictures of a report: every layer, byte and event is there, once and as long as it is."""

from itertools import pairwise
from math import dist
from xml.etree import ElementTree

import msgspec
import pytest
from sample_results import a_plan, an_estimate

from shardwright.display.plan_picture import draw_memory, draw_plan
from shardwright.display.svg import WIDTH, document, strategy_colour, term_colour, ticks
from shardwright.display.timeline import draw_timeline
from shardwright.display.units import bytes_text, seconds_text
from shardwright.types import DataParallel, Recompute, SequenceParallel

SVG = "{http://www.w3.org/2000/svg}"
MIB = 1024 * 1024


def _rectangles(drawing):
    root = ElementTree.fromstring(drawing)
    return [
        (rectangle.find(f"{SVG}title").text, float(rectangle.get("x")), float(rectangle.get("width")))
        for rectangle in root.iter(f"{SVG}rect")
        if rectangle.find(f"{SVG}title") is not None
    ]


def test_a_plans_picture_shows_each_layer_once_in_order():
    plan = a_plan()
    cells = _rectangles(draw_plan(plan))
    shown = sorted({(x, title) for title, x, _ in cells})
    names = [title.partition(":")[0] for _, title in shown]
    assert names == ["embedding", *(f"layer {i}" for i in range(8)), "head"]
    assert shown[1][1] == "layer 0: tp1 x dp4 zero3 recompute full"


@pytest.mark.parametrize("layers", [8, 26, 32, 80, 128])
def test_the_words_above_a_plan_neither_meet_nor_leave_the_picture(layers):
    plan = a_plan()
    model = msgspec.structs.replace(plan.model, layers=("block",) * layers)
    stages = (
        msgspec.structs.replace(plan.stages[0], layers=((0, 4),)),
        msgspec.structs.replace(plan.stages[1], layers=((4, layers),)),
    )
    every = (*plan.layers[:4], *plan.layers[4:5] * (layers - 4))
    plan = msgspec.structs.replace(plan, model=model, stages=stages, layers=every)
    root = ElementTree.fromstring(draw_plan(plan))
    spans = []
    for word in (each for each in root.iter(f"{SVG}text") if each.get("y") == "16"):
        x, wide = float(word.get("x")), 6.0 * len(word.text)
        start = {"middle": x - wide / 2, "end": x - wide}[word.get("text-anchor")]
        spans.append((start, start + wide, word.text))
    assert [spans[0][2], spans[1][2], spans[-1][2]] == ["emb", "0", "head"]
    assert spans[0][0] >= 0 and spans[-1][1] <= WIDTH
    assert all(one[1] < other[0] for one, other in pairwise(spans)), spans


def _colours(drawing):
    """The fills of what has a hover text, by the first word of that."""
    rectangles = [
        each for each in ElementTree.fromstring(drawing).iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None
    ]
    return {each.find(f"{SVG}title").text.split(":")[0]: each.get("fill") for each in rectangles}


def test_what_has_a_colour_in_one_picture_has_it_in_all():
    """Whatever comes first: a stage without gradients, a plan of which the layers come in another order."""
    plan = a_plan()
    estimate = an_estimate(plan, 0.2)
    first = estimate.stages[0]
    lean = {name: size for name, size in reversed(first.memory_terms_bytes.items()) if name != "parameters"}
    other = msgspec.structs.replace(estimate, stages=(msgspec.structs.replace(first, memory_terms_bytes=lean),))
    usual, lacking = _colours(draw_memory(estimate, None)), _colours(draw_memory(other, None))
    assert lacking == {name: colour for name, colour in usual.items() if name != "parameters"}
    assert usual["optimizer"] == term_colour("optimizer") and usual["gradients"] == term_colour("gradient_sync")
    layers = _colours(draw_plan(plan))
    turned = _colours(draw_plan(msgspec.structs.replace(plan, layers=tuple(reversed(plan.layers)))))
    assert layers["layer 0"] == turned["layer 7"] != layers["layer 7"] == turned["layer 0"]


def test_layers_of_unlike_sharing_and_width_have_unlike_colours_and_recomputation_none_of_its_own():
    layer = a_plan().layers[-1]
    kinds = [
        msgspec.structs.replace(layer, **changed)
        for changed in (
            {"tp_size": 1, "dp_size": 4, "data_parallel": DataParallel.DDP, "sequence_parallel": SequenceParallel.NONE},
            {
                "tp_size": 1,
                "dp_size": 4,
                "data_parallel": DataParallel.ZERO3,
                "sequence_parallel": SequenceParallel.NONE,
            },
            {"data_parallel": DataParallel.ZERO3},
            {"data_parallel": DataParallel.ZERO3, "tp_consecutive": False},
            {"sequence_parallel": SequenceParallel.ULYSSES},
            {"tp_size": 4, "dp_size": 1},
            {},
        )
    ]
    assert len({strategy_colour(kind) for kind in kinds}) == len(kinds)
    assert strategy_colour(msgspec.structs.replace(layer, recompute=Recompute.FULL)) == strategy_colour(layer)


def _lab(colour):
    """CIE L*a*b* (D65) of an sRGB colour."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    rows = (0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)
    xyz = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in rows]
    scaled = [v / w for v, w in zip(xyz, (0.9505, 1.0, 1.089), strict=True)]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("kind", DataParallel)
def test_tensor_parallel_sizes_that_are_neighbours_have_colours_that_are_told_apart(kind):
    """A difference of 2.3 in CIE L*a*b* can just be seen; 8 is seen at a glance."""
    layer = msgspec.structs.replace(a_plan().layers[4], data_parallel=kind, dp_size=2)
    colours = [_lab(strategy_colour(msgspec.structs.replace(layer, tp_size=size))) for size in (1, 2, 4, 8)]
    assert all(dist(*pair) > 8 for pair in pairwise(colours))


@pytest.mark.parametrize("draw", [lambda plan: draw_plan(plan), lambda plan: draw_memory(an_estimate(plan, 0.2), MIB)])
def test_a_picture_shows_in_a_viewer_that_knows_no_style_sheet(draw):
    """Its colours and sizes are attributes; a style sheet only turns them dark where the reader's page is."""
    drawn = document(draw(a_plan()))
    root = ElementTree.fromstring(drawn)
    assert "var(" not in drawn and "class=" not in drawn
    assert "@media (prefers-color-scheme: dark)" in root.find(f"{SVG}style").text.strip().splitlines()[0]
    assert root.get("fill").startswith("#") and root.get("font-size") == "13"


def test_memory_bars_are_as_long_as_their_bytes():
    bars = _rectangles(draw_memory(an_estimate(a_plan(), 0.2), 64 * MIB))
    lengths = {title.partition(":")[0]: width for title, _, width in bars[:5]}
    assert lengths["optimizer"] == pytest.approx(2 * lengths["gradients"], rel=0.01)
    assert lengths["activations"] == pytest.approx(2.5 * lengths["parameters"], rel=0.01)


def test_a_budget_out_of_reach_is_said_in_words():
    estimate = an_estimate(a_plan(), 0.2)
    assert "off the scale" in draw_memory(estimate, 6000 * MIB)
    assert "off the scale" not in draw_memory(estimate, 64 * MIB)


def test_the_timeline_shows_every_event_whatever_its_kind():
    plan = a_plan()
    estimate = an_estimate(plan, 0.2)
    assert len(_rectangles(draw_timeline(plan, estimate))) == len(estimate.timeline)
    odd = msgspec.structs.replace(estimate.timeline[0], kind="reshard")
    drawing = draw_timeline(plan, msgspec.structs.replace(estimate, timeline=(odd, *estimate.timeline[1:])))
    assert "reshard" in drawing


def test_a_reduction_beside_a_backward_pass_hides_nothing():
    plan = a_plan()
    estimate = an_estimate(plan, 0.2)
    (*_, backward) = (event for event in estimate.timeline if event.kind == "backward")
    beside = msgspec.structs.replace(backward, kind="gradient_sync")
    drawing = draw_timeline(plan, msgspec.structs.replace(estimate, timeline=(backward, beside)))
    bars = [bar for bar in ElementTree.fromstring(drawing).iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    one, other = ((float(bar.get("y")), float(bar.get("height"))) for bar in bars)
    assert sum(one) <= other[0] < sum(other)


@pytest.mark.parametrize(("time_s", "words"), [(0.2, "200 ms"), (1.5, "1.5 s"), (1234.6, "1235 s"), (3e-5, "30 µs")])
def test_times_have_a_unit(time_s, words):
    assert seconds_text(time_s) == words


@pytest.mark.parametrize(("size", "words"), [(512, "512 B"), (1536, "1.5 KiB"), (5 << 40, "5120 GiB")])
def test_sizes_have_a_unit(size, words):
    assert bytes_text(size) == words


@pytest.mark.parametrize("largest", [0.013, 1.0, 7.7, 999.0])
def test_ticks_start_at_nothing_and_stay_within(largest):
    found = ticks(largest)
    assert found[0] == 0
    assert 3 <= len(found) <= 7
    assert found[-1] <= largest * (1 + 1e-9)
