"""The values that files hold: JSON documents here, HDF5 profiles in `hardware_profile` and `model_profile`."""

from shardwright.types.cluster import *
from shardwright.types.limits import *
from shardwright.types.measurement import *
from shardwright.types.model import *
from shardwright.types.plan import *
from shardwright.types.prediction import *
from shardwright.types.run import *
from shardwright.types.strategy import *
