"""What a run says at its end, from its metrics and its export folder."""

from pathlib import Path

from common.metrics import read_metrics


def summarize(run_dir: Path) -> str:
    """Held-out acceptance before and after, the control, and where the drafter is."""
    lines = list(read_metrics(run_dir, "drafter-0"))
    evaluations = [line for line in lines if "acceptance" in line]
    losses = [line["loss"] for line in lines if "loss" in line]
    out = []
    if losses:
        out.append(f"loss                                   {losses[0]:.4f} -> {losses[-1]:.4f}")
    if evaluations:
        before, after = evaluations[0]["acceptance"], evaluations[-1]["acceptance"]
        control = evaluations[-1]["acceptance_other_prompt"]
        out.append(f"held-out acceptance length             {before:.3f} before, {after:.3f} after training")
        out.append(f"  with another prompt's hidden states  {control:.3f}; the hidden states carry {after - control:.3f}")
    if (run_dir / "export" / "config.json").exists():
        out.append(f"exported drafter                       {run_dir / 'export'}")
    return "\n".join(out)
