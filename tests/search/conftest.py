"""Made-up models, clusters and profiles, and the files they are read from."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up import make_cluster, make_hardware, make_model, make_profile, make_profiles, make_request

from shardwright.io import write_document
from shardwright.types import Cluster, Model
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright.types.model_profile import ModelProfile, write_model_profile
from shardwright_search.cost_model.profiles import index_profiles
from shardwright_search.search import Infeasible, SearchAnswer, find_best
from shardwright_search.space.request import SearchRequest


@pytest.fixture
def make() -> SimpleNamespace:
    """The builders of made-up models, clusters, profiles and requests."""
    return SimpleNamespace(
        cluster=make_cluster,
        hardware=make_hardware,
        index=lambda hardware, profile: index_profiles(hardware, Path("h.h5"), profile, Path("m.h5")),
        model=make_model,
        profile=make_profile,
        profiles=make_profiles,
        request=make_request,
    )


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., dict[str, Path]]:
    """Writes the input files of a search into a folder and names them by role."""

    def write(model: Model, cluster: Cluster, request: SearchRequest, profile: ModelProfile) -> dict[str, Path]:
        names = {"cluster": "c.json", "model": "model.json", "hardware": "h.h5", "profile": "m.h5", "search": "s.json"}
        paths = {role: tmp_path / name for role, name in names.items()}
        write_document(paths["cluster"], cluster)
        write_document(paths["model"], model)
        write_document(paths["search"], request)
        write_hardware_profile(paths["hardware"], make_hardware(cluster))
        write_model_profile(paths["profile"], profile)
        return paths

    return write


@pytest.fixture
def searched(make: SimpleNamespace) -> Callable[..., SearchAnswer | Infeasible]:
    """The answer to a request with these options for four layers on four devices."""

    def answer(devices: int = 4, model: Model | None = None, **options: object) -> SearchAnswer | Infeasible:
        model, cluster = model or make.model(4), make.cluster(devices)
        profiles = make.profiles(model, cluster)
        return find_best(make.request(**options), model, cluster, profiles, Path("s.json"), lambda line: None)

    return answer


@pytest.fixture
def config(tmp_path):
    """A config.json of a tiny Llama, for advice."""
    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "llama", **shape, "num_attention_heads": 8, "max_position_embeddings": 512})
    )
    return path
