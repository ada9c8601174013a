"""What a compiled step must be, whatever the model and the chip."""

from __future__ import annotations

from jaxserve.plan.bucket import BucketReport
from jaxserve.plan.planning import Plan

MOST_TEMPORARIES = 0.03  # of a device's memory


def implied_collectives(plan: Plan) -> dict[str, int]:
    """What splitting a model over devices asks for in a step, and nothing beside it.

    A sum after each layer's attention (where its heads are split) and after its MLP, one after the look-up of
    embeddings; logits exchanged once and sampled tokens gathered once (`sampler.sample_over_mesh`).
    """
    if plan.target.mesh.size == 1:
        return {}
    sums = 2 if plan.skeleton.shard_heads else 1
    counts = {"all-reduce": sums * plan.skeleton.config.num_layers + 1, "all-gather": 1}
    # Sampling takes whole rows; a vocabulary that is not split needs no exchange for that.
    if plan.skeleton.config.vocab_size % plan.target.mesh.size:
        counts["all-reduce"] -= 1  # the embeddings are whole on each device too
    else:
        counts["all-to-all"] = 1
    return counts


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
