"""A plan for people and for programs: the verdict and tables, and the object of `--json`."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxserve.plan.bucket import BucketReport
from jaxserve.plan.planning import Plan, StepBound

_GIB = 1 << 30


def compiler_version(plan: Plan) -> str:
    """The package that compiled, and its version; without a package, what the compiler says of itself."""
    platform = plan.target.chip.platform
    package = "libtpu" if platform == "tpu" else "jax-cuda13-plugin"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        device = plan.target.mesh.devices.flat[0]
        return " ".join(str(device.client.platform_version).split())


def to_json(plan: Plan) -> dict[str, Any]:
    """The object of `jaxserve plan --json`; bytes are those of one device."""
    layers = plan.skeleton.config.num_layers
    counts = plan.collectives()
    found: dict[str, Any] = {
        "fits": plan.fits,
        "missing_bytes": plan.missing_bytes,
        "model": plan.model,
        "topology": plan.target.topology,
        "devices": plan.target.mesh.size,
        "hbm_bytes": plan.target.memory_bytes,
        "weights_bytes_per_device": plan.weights_bytes,
        "tables_bytes": plan.tables_bytes,
        "pool_pages": plan.pool.num_pages - 1 if plan.pool else 0,
        "pool_tokens": plan.pool.num_tokens if plan.pool else 0,
        "page_size": plan.pool.page_size if plan.pool else 0,
        "pool_bytes_per_device": plan.pool_bytes,
        "max_model_len": plan.limits.max_model_len if plan.limits else 0,
        "temp_bytes": plan.temp_bytes,
        "pool_copies": plan.pool_copies,
        "pool_aliased": plan.pool_aliased,
        # Whole layers' worth; what is left of a division by the layers runs once a step.
        "collectives": {kind: count // layers for kind, count in counts.items() if count >= layers},
        "collectives_total": counts,
        "collectives_once": {kind: count % layers for kind, count in counts.items() if count % layers},
        "decode_ms_bound": _milliseconds(plan.decode),
        "prefill_ms_bound": _milliseconds(plan.prefill),
        "tokens_per_s_bound": plan.decode.tokens_per_second if plan.decode else None,
        "prefill_tokens_per_s_bound": plan.prefill.tokens_per_second if plan.prefill else None,
        "decode": _bound(plan.decode),
        "prefill": _bound(plan.prefill),
        "buckets": [_bucket(report) for report in plan.reports],
        "jax": jax.__version__,
        "compiler": compiler_version(plan),
    }
    return found


def _milliseconds(step: StepBound | None) -> float | None:
    return step.bound.seconds * 1e3 if step else None


def _bound(step: StepBound | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "rows": step.rows,
        "new_tokens": step.tokens,
        "context": step.context,
        "memory_ms": step.bound.memory * 1e3,
        "arithmetic_ms": step.bound.arithmetic * 1e3,
        "links_ms": step.bound.links * 1e3,
        "limit": step.bound.limit,
    }


def _bucket(report: BucketReport) -> dict[str, Any]:
    return {
        "kind": "decode" if report.bucket.decode_only else "mixed",
        "tokens": report.bucket.num_tokens,
        "rows": report.bucket.num_rows,
        "temp_bytes": report.temp_bytes,
        "code_bytes": report.code_bytes,
        "total_bytes": report.total_bytes,
        "pool_copies": list(report.pool_copies),
        "pool_aliased": report.pool_aliased,
        "collectives": {
            c.kind: {"count": c.count, "bytes": c.num_bytes, "is_lower_bound": c.is_lower_bound}
            for c in report.collectives
        },
        "custom_calls": report.kernels,
        "compile_seconds": round(report.seconds, 2),
    }


def verdict(plan: Plan) -> str:
    """One line."""
    chip, count = plan.target.chip.name, plan.target.mesh.size
    where = (
        f"{plan.model} on {count} of {plan.target.topology}" if count > 1 else f"{plan.model} on one {chip}"
    )
    if not plan.fits:
        return f"DOES NOT FIT: {where}: {plan.missing_bytes:,} bytes a device are missing"
    assert plan.pool is not None
    assert plan.limits is not None
    assert plan.decode is not None
    return (
        f"FITS: {where}: a pool of {plan.pool.num_tokens:,} tokens, context {plan.limits.max_model_len:,}, "
        f"at best {plan.decode.tokens_per_second:,.0f} tokens/s"
    )


def show(plan: Plan, console: Console) -> None:
    """The verdict, where a device's memory goes, what was compiled, and what it can reach at best."""
    console.print(verdict(plan), style="bold green" if plan.fits else "bold red")
    console.print(_memory_table(plan))
    if plan.reports:
        console.print(_program_table(plan))
        for talk in dict.fromkeys(_exchanges(report) for report in plan.reports):
            console.print(f"devices exchange in a step: {talk}")
    if plan.decode and plan.prefill:
        console.print(_bound_table(plan.decode, plan.prefill))
    console.print(f"jax {jax.__version__}, {compiler_version(plan)}; bounds from the chip's data sheet")


def _memory_table(plan: Plan) -> Table:
    table = Table("a device's memory", "GiB", "share", title_justify="left")
    rows = [("weights", plan.weights_bytes), ("token and bias tables", plan.tables_bytes)]
    if plan.pool is not None:
        pages = f"{plan.pool.num_pages - 1:,} pages of {plan.pool.page_size} tokens"
        rows.append((f"KV pool: {pages}", plan.pool_bytes))
    if plan.reports:
        rows.append(("temporaries of the largest step", plan.temp_bytes))
        rows.append(("programs", sum(report.code_bytes for report in plan.reports)))
    rows.append(("available", plan.target.memory_bytes))
    for name, size in rows:
        table.add_row(name, f"{size / _GIB:.2f}", f"{size / plan.target.memory_bytes:.1%}")
    return table


def _program_table(plan: Plan) -> Table:
    table = Table("step", "tokens", "rows", "temporaries", "pool copies", "pool shared", "sent")
    for report in plan.reports:
        table.add_row(
            "decode" if report.bucket.decode_only else "mixed",
            f"{report.bucket.num_tokens:,}",
            f"{report.bucket.num_rows:,}",
            _size(report.temp_bytes),
            str(len(report.pool_copies)),
            "yes" if report.pool_aliased else "NO",
            _size(report.link_bytes),
        )
    return table


def _exchanges(report: BucketReport) -> str:
    return ", ".join(f"{c.count} {c.kind}" for c in report.collectives) or "nothing"


def _bound_table(decode: StepBound, prefill: StepBound) -> Table:
    table = Table("at best", "ms", "memory", "arithmetic", "links", "tokens/s")
    for name, step in (
        (f"decode, {decode.rows:,} requests at {decode.context:,} tokens", decode),
        (f"prefill of {prefill.tokens:,} tokens", prefill),
    ):
        b = step.bound
        parts = (f"{seconds * 1e3:.2f}" for seconds in (b.memory, b.arithmetic, b.links))
        table.add_row(name, f"{b.seconds * 1e3:.2f}", *parts, f"{step.tokens_per_second:,.0f}")
    return table


def _size(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
