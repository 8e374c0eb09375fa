"""Printed tables of many columns: split where there is no room, nothing broken but words, nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.display.columns import PrintedColumn, split_columns, widths_of

CELLS = st.lists(st.text("ab 1", max_size=30), min_size=2, max_size=2)
COLUMNS = st.lists(st.builds(PrintedColumn, st.text("xy ", max_size=20), CELLS, is_words=st.booleans()), max_size=9)


@given(COLUMNS, st.integers(0, 3), st.integers(10, 120))
def test_each_column_is_in_one_table_and_the_first_ones_are_in_all(columns, repeated, room):
    blocks = split_columns(columns, repeated, room)
    assert [column for block in blocks for column in block[repeated:]] == columns[repeated:]
    assert all(block[:repeated] == columns[:repeated] for block in blocks)
    for block in blocks:
        taken = 1 + sum(width + 3 for width in widths_of(block, room))
        assert taken <= room or len(block) <= repeated + 1
        assert all(width >= column.min_width for width, column in zip(widths_of(block, room), block, strict=True))


def test_a_heading_is_broken_between_words_before_a_table_is_split_and_numbers_never_are():
    numbers = [PrintedColumn("samples a second", ["1.25"]), PrintedColumn("b", ["123456789"])]
    assert [column.min_width for column in numbers] == [7, 9]
    assert split_columns(numbers, 0, 23) == [numbers] and widths_of(numbers, 23) == [7, 9]
    assert widths_of(numbers, 60) == [16, 9]
    assert split_columns(numbers, 0, 22) == [numbers[:1], numbers[1:]]


@pytest.mark.parametrize(("cells", "width"), [(["short"], 5), (["word " * 30], 40)])
def test_words_have_some_room_before_they_are_broken(cells, width):
    assert PrintedColumn("plan", cells, is_words=True).min_width == width
