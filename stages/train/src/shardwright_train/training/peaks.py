"""Peak rates of devices, for the share of them that a run uses."""

__all__ = ["peak_flops_per_s"]

# Dense matrix rates without sparsity, from NVIDIA's data sheets of A100 (2021), H100 (2023) and H200 (2024).
_BFLOAT16 = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
}


def peak_flops_per_s(device_name: str, compute_dtype: str) -> float | None:
    """The published peak of one device in a compute dtype, or None where it is not known here."""
    return _BFLOAT16.get(device_name) if compute_dtype == "bfloat16" else None
