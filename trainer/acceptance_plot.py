"""A picture of acceptance by position beside each checkpoint."""

from pathlib import Path

from matplotlib.figure import Figure  # not pyplot, which would ask for a display or take a notebook's plots away
from transformers import TrainerCallback


def plot_acceptance(shares: dict[str, list[float]], path: str | Path):
    """
    Draw the share of blocks whose draft is accepted up to each position.

    Args:
        shares (`dict[str, list[float]]`): By name of a curve, one share a position.
        path (`str` or `Path`): PNG to write.
    """
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, values in shares.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set(xlabel="drafted position", ylabel="share of blocks accepted so far", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


class AcceptancePlot(TrainerCallback):
    """Writes `acceptance.png` into a checkpoint: its last evaluation, and the first one of the run to compare with."""

    def on_save(self, args, state, control, **kwargs):
        evaluations = [entry for entry in state.log_history if "eval_accepted_at_1" in entry]
        if not state.is_world_process_zero or not evaluations:
            return
        shares = {}
        for entry in (evaluations[0], evaluations[-1]):
            slots = sorted(
                (key for key in entry if key.startswith("eval_accepted_at_")), key=lambda key: int(key[17:])
            )
            shares[f"step {entry['step']}"] = [entry[slot] for slot in slots]
        plot_acceptance(shares, Path(args.output_dir) / f"checkpoint-{state.global_step}" / "acceptance.png")
