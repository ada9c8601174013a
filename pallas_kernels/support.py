"""Which implementation of which operation runs on which platform, as a table that the code itself obeys.

A named implementation that cannot serve raises and says why; `auto` takes the first of a platform's list.
Nothing falls back silently.
"""

from __future__ import annotations

PLATFORMS = ("cpu", "gpu", "tpu")

# operation -> platform -> implementations, the preferred one first
SUPPORT: dict[str, dict[str, tuple[str, ...]]] = {
    "ragged_paged_attention": dict.fromkeys(PLATFORMS, ("xla", "reference")),
    "kv_write": dict.fromkeys(PLATFORMS, ("xla",)),
    "grouped_matmul": {
        "cpu": ("xla_loop", "xla", "reference"),
        "gpu": ("xla_loop", "xla", "reference"),
        "tpu": ("xla", "xla_loop", "reference"),
    },
}


def resolve(operation: str, platform: str, implementation: str = "auto") -> str:
    """The name of the implementation to use.

    Raises NotImplementedError when the platform is unknown or the named implementation does not serve it.
    """
    table = SUPPORT[operation]
    if platform not in table:
        raise NotImplementedError(
            f"{operation}: no implementation for platform {platform!r} (have: {', '.join(table)})"
        )
    if implementation == "auto":
        return table[platform][0]
    if implementation not in table[platform]:
        raise NotImplementedError(
            f"{operation}: implementation {implementation!r} does not run on {platform} "
            f"(have: auto, {', '.join(table[platform])})"
        )
    return implementation
