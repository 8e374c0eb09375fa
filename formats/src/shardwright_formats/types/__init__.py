"""The values that files hold: JSON documents here, HDF5 profiles in `hardware_profile` and `model_profile`."""

from shardwright_formats.types.certificate import *
from shardwright_formats.types.cluster import *
from shardwright_formats.types.context_probes import *
from shardwright_formats.types.correction import *
from shardwright_formats.types.expert_load import *
from shardwright_formats.types.expert_probes import *
from shardwright_formats.types.limits import *
from shardwright_formats.types.low_rank import *
from shardwright_formats.types.measurement import *
from shardwright_formats.types.model import *
from shardwright_formats.types.plan import *
from shardwright_formats.types.prediction import *
from shardwright_formats.types.regions import *
from shardwright_formats.types.run import *
from shardwright_formats.types.strategy import *
