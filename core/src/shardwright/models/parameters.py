"""Parameters of the modules that families consist of, named and ordered as in the stock models of transformers.

Tensor parallelism shards as in Megatron-LM (Shoeybi et al. 2019): the first matrix of a part by its outputs
("columns"), the last one by its inputs ("rows"), and the vocabulary.
"""

from collections.abc import Iterator
from typing import Literal

from shardwright.models.traits import Config
from shardwright.types import Parameter

Parameters = Iterator[Parameter]
Cut = Literal["columns", "rows", "whole"]


def linear(name: str, outputs: int, inputs: int, cut: Cut = "whole", bias: bool = False) -> Parameters:
    """Yield the parameters of a torch Linear: weight [outputs, inputs], bias [outputs]."""
    dim = {"columns": 0, "rows": 1, "whole": None}[cut]
    yield Parameter(name=f"{name}.weight", shape=(outputs, inputs), tp_dim=dim)
    if bias:
        yield _bias(name, outputs, cut)


def gated(path: str, hidden: int, inner: int, bias: bool = False) -> Parameters:
    """Yield the parameters of a gated feed-forward part, named as in Llama."""
    for name in ("gate_proj", "up_proj"):
        yield from linear(f"{path}.{name}", inner, hidden, "columns", bias)
    yield from linear(f"{path}.down_proj", hidden, inner, "rows", bias)


def conv1d(name: str, outputs: int, inputs: int, cut: Cut) -> Parameters:
    """Yield the parameters of GPT-2's linear layer: weight [inputs, outputs], bias [outputs]."""
    yield Parameter(name=f"{name}.weight", shape=(inputs, outputs), tp_dim=1 if cut == "columns" else 0)
    yield _bias(name, outputs, cut)


def norm(name: str, features: int, bias: bool = True) -> Parameters:
    """Yield the parameters of a LayerNorm, or, without bias, of an RMSNorm."""
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Parameter(name=f"{name}.{kind}", shape=(features,))


def vocabulary(name: str, config: Config) -> Parameters:
    """Yield a matrix with one row per token of the vocabulary, sharded over these rows."""
    yield Parameter(name=name, shape=(config["vocab_size"], config["hidden_size"]), tp_dim=0)


def _bias(name: str, outputs: int, cut: Cut) -> Parameter:
    return Parameter(
        name=f"{name}.bias", shape=(outputs,), tp_dim=0 if cut == "columns" else None, inside=cut == "rows"
    )
