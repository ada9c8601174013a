"""What a compiled step must be, whatever the model and the chip."""

from __future__ import annotations

from jaxserve.plan.bucket import BucketReport
from jaxserve.plan.planning import Plan

MOST_TEMPORARIES = 0.03  # of a device's memory


def implied_collectives(plan: Plan) -> dict[str, int]:
    """What splitting a model over devices asks for in a step, and nothing beside it.

    A sum after each layer's attention and after its MLP, one after the look-up of embeddings; logits
    exchanged once and sampled tokens gathered once (`sampler.sample_over_mesh`).
    """
    if plan.target.mesh.size == 1:
        return {}
    config, num_devices = plan.skeleton.config, plan.target.mesh.size
    # What does not divide is whole on every device, and asks for nothing.
    mlp_parts = config.num_experts or config.intermediate_size
    sums = (plan.skeleton.heads.axis is not None) + (mlp_parts % num_devices == 0)
    is_vocab_split = config.vocab_size % num_devices == 0
    counts = {
        "all-reduce": sums * config.num_layers + is_vocab_split,
        "all-to-all": int(is_vocab_split),
        "all-gather": 1,
    }
    return {kind: count for kind, count in counts.items() if count}


def failures(plan: Plan) -> list[str]:
    """What is wrong, a line each; none for a sound plan."""
    if not plan.fits:
        return [f"does not fit by {plan.missing_bytes:,} bytes a device"]
    return [line for report in plan.reports for line in _of_bucket(plan, report)]


def _of_bucket(plan: Plan, report: BucketReport) -> list[str]:
    kind = "decode" if report.bucket.decode_only else "mixed"
    where = f"{kind} step for {report.bucket.num_tokens} tokens in {report.bucket.num_rows} rows"
    found = []
    if report.pool_copies:
        found.append(f"{where}: makes {len(report.pool_copies)} values of the pool's size")
    if not report.pool_aliased:
        found.append(f"{where}: the pool does not come back in its own memory")
    counts, implied = {c.kind: c.count for c in report.collectives}, implied_collectives(plan)
    if counts != implied:
        found.append(f"{where}: exchanges {counts}, implied are {implied}")
    if any(c.is_lower_bound for c in report.collectives):
        found.append(f"{where}: exchanges in a loop of unknown length")
    share = report.temp_bytes / plan.target.memory_bytes
    if share >= MOST_TEMPORARIES:
        found.append(f"{where}: temporaries take {share:.1%} of memory, at most {MOST_TEMPORARIES:.0%} may")
    return found
