"""Which implementation of which operation runs on which platform, as a table that the code itself obeys.

A named implementation that cannot serve raises and says why; `auto` takes the first of a platform's list.
Nothing falls back silently.
"""

from __future__ import annotations

PLATFORMS = ("cpu", "gpu", "tpu")

# operation -> platform -> implementations, the preferred one first
SUPPORT: dict[str, dict[str, tuple[str, ...]]] = {
    "ragged_paged_attention": {
        "cpu": ("cpu", "xla", "reference"),
        "gpu": ("mosaic_gpu", "xla", "reference"),
        "tpu": ("mosaic_tpu", "xla", "reference"),
    },
    "grouped_matmul": {
        "cpu": ("xla_loop", "xla", "reference"),
        "gpu": ("mosaic_gpu", "xla_loop", "xla", "reference"),
        "tpu": ("xla", "xla_loop", "reference"),
    },
    "quantized_matmul": {
        "cpu": ("xla", "reference"),
        "gpu": ("mosaic_gpu", "xla", "reference"),
        "tpu": ("mosaic_tpu", "xla", "reference"),
    },
    "packed_matmul": {"cpu": ("cpu", "reference")},
}
# Implementations that some chips of their platform cannot run. A CPU's chip is its instruction set.
CHIPS: dict[str, tuple[str, ...]] = {
    "mosaic_gpu": ("h100", "h200"),
    "cpu": ("avx512_vnni", "avx_vnni", "avx2"),
}


def resolve(operation: str, platform: str, implementation: str = "auto", *, chip: str | None = None) -> str:
    """The name of the implementation to use: the first that the chip (None: unknown) can run, or the named.

    Raises NotImplementedError when the platform is unknown or the named implementation does not serve it.
    """
    table = SUPPORT[operation]
    if platform not in table:
        raise NotImplementedError(
            f"{operation}: no implementation for platform {platform!r} (have: {', '.join(table)})"
        )
    fitting = [name for name in table[platform] if name not in CHIPS or chip in CHIPS[name]]
    if implementation == "auto":
        return fitting[0]
    if implementation not in table[platform]:
        raise NotImplementedError(
            f"{operation}: implementation {implementation!r} does not run on {platform} "
            f"(have: auto, {', '.join(table[platform])})"
        )
    if implementation not in fitting:
        raise NotImplementedError(
            f"{operation}: implementation {implementation!r} runs on {', '.join(CHIPS[implementation])}, "
            f"not on {chip or 'an unknown chip'} (have: auto, {', '.join(fitting)})"
        )
    return implementation
