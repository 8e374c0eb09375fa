"""The families whose plans are compared with one process, and those of whose samples some are of several documents."""

FAMILIES = (
    *("llama", "qwen3", "mistral", "gpt2", "bert", "t5", "vit", "olmo2", "gemma2", "gemma3_text", "cohere", "cohere2"),
    *("baichuan", "glm4", "granite", "mixtral", "qwen3_moe", "gpt_oss", "roberta", "smollm3", "phi3", "modernbert"),
    *("swin", "siglip", "whisper", "llava", "gemma3", "deepseek_v2", "deepseek_v3", "llama4_text", "ministral3"),
    "mistral3",
)
PACKED = ("qwen3", "gpt2", "bert", "roberta", "ministral3")
