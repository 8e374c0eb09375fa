"""Have megatron-core make the model that a file of arguments describes: python megatron_model.py FILE.

Prints how many numbers of parameters it has. Nothing is stored: tensors are on the meta device.
"""

import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron_parser import parser
from systems_parsers import megatron_config


def main(file: str) -> None:
    given = parser().parse_args(shlex.split(Path(file).read_text()))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    # Rotary embeddings of latents are on a GPU whatever it is asked.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    # It asks whether a layer is of this type, which is none without Transformer Engine.
    multi_latent_attention.TELinear = IdentityOp
    # Grouped products need Transformer Engine; the parameters are the same.
    config = megatron_config(
        given, use_cpu_initialization=True, perform_initialization=False, moe_grouped_gemm=False, pipeline_dtype=None
    )
    if config.num_moe_experts is None:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        for layer in spec.layer_specs:
            # Without Transformer Engine it has no attention from latents; what computes scores has no parameters.
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
    with torch.device("meta"):
        model = GPTModel(
            config,
            spec,
            given.vocab_size,
            given.max_position_embeddings,
            share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
            position_embedding_type=given.position_embedding_type,
        )
    print(sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main(sys.argv[1])
