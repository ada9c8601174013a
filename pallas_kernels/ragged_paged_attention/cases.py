"""Named batch shapes, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.ragged_paged_attention.types import AttentionSpec


@dataclass(frozen=True)
class Case:
    """rows: (queries, tokens) of each sequence. v_dim None: as long as head_dim."""

    name: str
    rows: tuple[tuple[int, int], ...]
    empty_rows: int = 0
    padding_tokens: int = 0
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    v_dim: int | None = None
    latent: bool = False  # V is the first v_dim elements of K
    page_size: int = 16
    num_layers: int = 2
    layer: int = 1
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    rotary: int | None = None  # leading elements of q and k that the call rotates
    kv_dtype: str = "float32"
    scales: bool = False  # of K and V in the pool, one a head

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def kv_dim(self) -> int:
        return self.head_dim if self.latent else self.head_dim + self.value_dim

    @property
    def is_decode(self) -> bool:
        return all(q == 1 for q, _ in self.rows) and self.padding_tokens == self.empty_rows

    def spec(self, *, decode_only: bool = False) -> AttentionSpec:
        return AttentionSpec(
            self.head_dim**-0.5,
            soft_cap=self.soft_cap,
            v_dim=None if self.latent else self.value_dim,
            latent_v_dim=self.v_dim if self.latent else None,
            decode_only=decode_only,
        )


# What any implementation has to get right, in shapes small enough for one that is interpreted.
CASES: tuple[Case, ...] = (
    Case("one prompt", rows=((37, 37),)),
    Case("one token", rows=((1, 1),)),
    Case("decodes of ragged lengths", rows=((1, 1), (1, 16), (1, 17), (1, 200), (1, 63))),
    Case("many blocks in one row", rows=((1, 1500),), page_size=32),
    Case("more items than a loop step takes", rows=((1, 300),) * 24, page_size=8),
    Case("mixed", rows=((1, 40), (1, 7), (20, 20), (33, 90), (2, 65)), padding_tokens=5, empty_rows=3),
    Case("a decode behind a prompt", rows=((19, 19), (1, 30), (70, 70), (1, 3))),
    Case(
        "short prompts side by side",
        rows=((3, 9), (2, 2), (1, 30), (3, 3), (5, 20), (2, 70), (1, 1), (9, 9), (40, 40), (2, 3)),
        padding_tokens=3,
    ),
    Case("a chunk of a long context", rows=((65, 700), (64, 64), (130, 131)), page_size=32),
    Case("empty rows alone", rows=(), empty_rows=3, padding_tokens=3),
    Case("empty rows behind decodes", rows=((1, 20), (1, 33)), empty_rows=2, padding_tokens=2),
    Case(
        "grouped heads that are no power of two",
        rows=((9, 9), (1, 80)),
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
    ),
    Case("one key-value head", rows=((5, 29), (1, 12)), num_q_heads=4, num_kv_heads=1, head_dim=16),
    Case(
        "as many key-value heads as heads",
        rows=((5, 29), (1, 12)),
        num_q_heads=3,
        num_kv_heads=3,
        head_dim=80,
    ),
    Case("heads of 96", rows=((6, 31), (1, 50)), head_dim=96),
    Case("heads of 128", rows=((6, 31), (1, 50)), head_dim=128),
    Case("heads of 256", rows=((6, 31), (1, 50)), head_dim=256, num_kv_heads=1),
    Case("values shorter than keys", rows=((7, 40), (1, 50)), head_dim=192, v_dim=128),
    Case(
        "latent rows",
        rows=((7, 40), (1, 50)),
        num_q_heads=16,
        num_kv_heads=1,
        head_dim=72,
        v_dim=64,
        latent=True,
    ),
    Case(
        "latent rows in int8",
        rows=((7, 40), (1, 50)),
        num_q_heads=8,
        num_kv_heads=1,
        head_dim=72,
        v_dim=64,
        latent=True,
        page_size=32,
        kv_dtype="int8",
        scales=True,
    ),
    Case("pages of 48", rows=((1, 49), (70, 130)), page_size=48),
    Case("the widest window", rows=((1, 41), (45, 85), (3, 3)), page_size=8, window=2**31 - 1),
    Case("pages of 8", rows=((1, 9), (12, 23)), page_size=8),
    Case("pages of 64", rows=((1, 65), (70, 130)), page_size=64),
    Case("pages of 128", rows=((1, 129), (140, 300)), page_size=128),
    Case("pages of 256", rows=((1, 257), (3, 255)), page_size=256),
    Case("a window", rows=((1, 300), (1, 20), (90, 200), (40, 40)), window=50),
    Case("a window of one token", rows=((1, 33), (7, 33)), window=1),
    Case("a window wider than every context", rows=((1, 33), (7, 33)), window=4096),
    Case("a soft cap", rows=((1, 33), (20, 33)), soft_cap=0.5),
    Case("sinks", rows=((1, 33), (20, 33), (1, 1)), sinks=True),
    Case(
        "window, cap and sinks together",
        rows=((1, 150), (20, 133), (1, 2)),
        window=40,
        soft_cap=2.0,
        sinks=True,
    ),
    Case("rotary positions", rows=((1, 33), (20, 33), (1, 1)), rotary=32, empty_rows=1, padding_tokens=2),
    Case("a part of each head turns", rows=((1, 90), (20, 33)), head_dim=40, rotary=12, window=50),
    Case("rotary positions in bfloat16", rows=((1, 90), (20, 33)), rotary=32, kv_dtype="bfloat16"),
    Case("a bfloat16 pool", rows=((1, 33), (20, 33)), kv_dtype="bfloat16"),
    Case("an int8 pool", rows=((1, 33), (20, 33)), kv_dtype="int8", scales=True),
    Case("a float8 pool", rows=((1, 33), (20, 33)), kv_dtype="float8_e4m3fn", scales=True),
)

_DECODES = ((1, 1000),) * 64
_MIXED = ((512, 512), (200, 1500), *((1, 1000),) * 30)
_LLAMA_8B = Case("Llama-3-8B", _DECODES, num_q_heads=32, num_kv_heads=8, head_dim=128, kv_dtype="bfloat16")

_SHAPES: tuple[Case, ...] = (
    _LLAMA_8B,
    replace(_LLAMA_8B, name="Llama-3-8B on 8", num_q_heads=4, num_kv_heads=1, page_size=128),
    replace(_LLAMA_8B, name="Llama-3-70B on 8", num_q_heads=8, num_kv_heads=1, page_size=64),
    replace(_LLAMA_8B, name="pages of 8", page_size=8),
    replace(_LLAMA_8B, name="pages of 256", page_size=256),
    replace(_LLAMA_8B, name="a float32 pool", kv_dtype="float32"),
    replace(_LLAMA_8B, name="an int8 pool", kv_dtype="int8", page_size=32, scales=True),
    replace(_LLAMA_8B, name="a float8 pool", kv_dtype="float8_e4m3fn", page_size=32, scales=True),
    replace(_LLAMA_8B, name="an int8 pool in pages of 8", kv_dtype="int8", page_size=8, scales=True),
    replace(_LLAMA_8B, name="Qwen3-30B-A3B on 4", num_q_heads=8, num_kv_heads=1),
    replace(_LLAMA_8B, name="SmolLM2-135M", num_q_heads=9, num_kv_heads=3, head_dim=64),
    replace(_LLAMA_8B, name="Gemma-3-12B", num_q_heads=16, num_kv_heads=8, head_dim=256, window=1024),
    replace(_LLAMA_8B, name="Gemma-2-9B", num_q_heads=16, head_dim=256, window=4096, soft_cap=50.0),
    replace(_LLAMA_8B, name="gpt-oss-20b", num_q_heads=64, head_dim=64, window=128, sinks=True),
    replace(_LLAMA_8B, name="Phi-3-mini", num_q_heads=32, num_kv_heads=32, head_dim=96),
    replace(_LLAMA_8B, name="values shorter", num_q_heads=16, num_kv_heads=16, head_dim=192, v_dim=128),
    replace(
        _LLAMA_8B,
        name="DeepSeek latent on 8",
        num_q_heads=16,
        num_kv_heads=1,
        head_dim=576,
        v_dim=512,
        latent=True,
        page_size=64,
    ),
)
# Real models' shapes, to compile and to time: decodes alone, and prompts among decodes.
REAL_CASES: tuple[Case, ...] = tuple(
    replace(case, name=f"{case.name}, {kind}", rows=rows)
    for case in _SHAPES
    for kind, rows in (("decode", _DECODES), ("mixed", _MIXED))
)
