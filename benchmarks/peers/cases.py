"""What both search: profiles that the peer ships, each with a cluster, a batch and a budget."""

from typing import NamedTuple

__all__ = ["CASES", "Case", "Layers"]


class Layers(NamedTuple):
    """Layers of one type, as the peer is told of them."""

    hidden_size: int
    seq_len: int
    layer_num: int


class Case(NamedTuple):
    """One profile of the peer's, a cluster, a batch and a budget."""

    name: str
    family: str
    """The peer's folder of it, and the name of the two files in it."""
    files: str
    profile: str
    model: str
    layers: tuple[Layers, ...]
    global_batch_size: int
    memory_gib: int
    nodes: int = 1
    sequence_parallel: str = "megatron"
    time_model: str = "batch"
    max_tp_size: int = 8
    max_pp_size: int = 8
    devices_per_node: int = 8

    @property
    def hardware(self) -> str:
        """Name of the imported hardware profile."""
        return f"a100-{self.nodes}x{self.devices_per_node}"


LLAMA = ("llama_hf", "hidden4096_head32_seqlen2048", "llama-7b-hf", "llama-7b-hf-2048", (Layers(4096, 2048, 32),))
GPT = ("gpt_hf", "hidden4096_head32_seqlen2048", "gpt-6.7b-hf", "gpt-6.7b-hf-2048", (Layers(4096, 2048, 32),))
BERT = ("bert_hf", "hidden1024_head16", "bert-large", "bert-large-512", (Layers(1024, 512, 24),))
VIT = ("vit_hf", "hidden2560_head32", "vit-xhuge", "vit-xhuge-197", (Layers(2560, 197, 128),))
T5 = ("T5", "t5-3B", "t5-3b", "t5-3b-512", (Layers(1024, 512, 24), Layers(1024, 512, 24)))
SWIN_LAYERS = (Layers(320, 3136, 2), Layers(640, 784, 2), Layers(1280, 196, 42), Layers(2560, 49, 2))
SWIN = ("swin", "swin-huge", "swin-huge", "swin-huge", SWIN_LAYERS)
# Times: at every batch size where the files have them, at every length for BERT, at one point for ViT and Swin.
CASES = (
    Case("llama-7b-1x8", *LLAMA, 16, 36),
    Case("llama-7b-2x8", *LLAMA, 32, 36, nodes=2),
    Case("gpt-6.7b-2x8", *GPT, 32, 36, nodes=2),
    Case("bert-large-1x8", *BERT, 128, 16, time_model="sequence"),
    Case("bert-large-1x8-3gib", *BERT, 128, 3, time_model="sequence"),
    # Memory at tp_size 8 is in none of ViT's tables.
    Case("vit-xhuge-1x8", *VIT, 64, 36, sequence_parallel="none", time_model="static", max_tp_size=4),
    Case("t5-3b-1x8", *T5, 64, 34),
    Case("swin-huge-1x8", *SWIN, 64, 5, sequence_parallel="none", time_model="static"),
)
