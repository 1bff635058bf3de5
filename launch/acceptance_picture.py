"""An evaluation as a picture: acceptance by position in the block, and by category."""

from pathlib import Path

from matplotlib.figure import Figure

from launch.decoding.report import Report


def draw_acceptance(report: Report, path: Path) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_position, by_category = figure.subplots(1, 2)
    groups = {name: found for name, found in report.categories.items() if found.num_rounds}
    for name, found in groups.items():
        by_position.plot(range(1, report.setup.block_size), found.acceptance_per_position, marker=".", alpha=0.7, label=name)
    if len(groups) > 1:
        places = range(1, report.setup.block_size)
        by_position.plot(places, report.total.acceptance_per_position, color="black", linewidth=2, label="total")
    by_position.set(title="Drafts accepted", xlabel="position in the block", ylabel="share of rounds", ylim=(0, 1.02))
    by_position.grid(alpha=0.3)
    if groups:
        by_position.legend()

    ordered = sorted(groups.items(), key=lambda item: item[1].acceptance)
    bars = by_category.barh([name for name, _ in ordered], [found.acceptance for _, found in ordered], color="tab:blue")
    by_category.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    by_category.axvline(report.total.acceptance, color="black", linestyle="--", label=f"total {report.total.acceptance:.2f}")
    by_category.set(title="Acceptance length", xlabel="tokens per verification round", xlim=(0, report.setup.block_size))
    by_category.legend()

    setup = report.setup
    chosen = "greedy" if setup.temperature == 0 else f"temperature {setup.temperature:g}, top_p {setup.top_p:g}"
    figure.suptitle(f"{setup.drafter} on {setup.target}: {report.total.num_answers} answers, {chosen}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
