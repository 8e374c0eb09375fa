"""Reading files strictly and writing them atomically: errors and JSON here, HDF5 in `hdf5` and `table`."""

from shardwright_formats.io.errors import *
from shardwright_formats.io.json import *
from shardwright_formats.io.suggestions import *
from shardwright_formats.io.text import *
