"""Reading files strictly and writing them atomically: errors and JSON here, HDF5 in `hdf5` and `table`."""

from shardwright.io.errors import *
from shardwright.io.json import *
