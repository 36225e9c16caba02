"""`evalkit cost`: rates, memory and outliers of checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from evalkit.cli.parameters import MODEL_ALONE, argument, command, option
from evalkit.cli.running import PLOT, Printer, checkpoints_of
from evalkit.display import Progress
from evalkit.errors import UsageError
from evalkit.inputs.reading import read_given_text
from evalkit.inputs.values import whole


@command(
    kind=MODEL_ALONE,
    order="batches lengths new rounds ORIGIN text device dtype attention CONTEXT TRUST printer plot",
    without=("device_map", "quantise"),
    resumes=False,
)
def cost(
    *,
    checkpoints: tuple[str, ...] = argument(metavar="CKPT..."),
    batches: tuple[int, ...] = option((1,), "Sequences at a time, separated by commas."),
    lengths: tuple[int, ...] = option((128, 512), "Tokens of each sequence, separated by commas."),
    new: int = option(16, "New tokens after the first.", shows_least=True),
    rounds: int = option(7, "Times that each checkpoint is timed, in turn with the others.", least=2, shows_least=True),
    text: Path | None = option(None, "Text for outliers and attention: its first 512 tokens.", "a short English one"),
    printer: Printer,
    plot: Path | None = PLOT,
    **options: Any,
) -> None:
    """Measure what models cost: prefill and decoding rates, memory, and outliers in their states by layer.

    Checkpoints take turns, so that the intervals of the ratios to the first checkpoint cover the noise of the machine;
    a checkpoint that is given twice shows this noise alone. Each rate is also printed as a share of the floor, the time
    of its arithmetic at the machine's own rates, measured in the same rounds. All checkpoints are in memory, and
    process random tokens as transformers runs them.

    \b
    evalkit cost demo
    evalkit cost CKPT_A CKPT_B --lengths 512,2048,8192 --batches 1,8 --device cuda --plot cost.pdf
    evalkit cost CKPT_A CKPT_B --format latex
    """
    import pandas as pd

    from evalkit.models.loading.spec import model_spec
    from evalkit.models.quantisation import calibration_ids
    from evalkit.studies import cost as costs

    content = None if text is None else read_given_text(text)[1]
    sizes, counts = ([*dict.fromkeys(whole(option, number, 1) for number in given)]
                     for option, given in (("--lengths", lengths), ("--batches", batches)))  # fmt: skip
    models, copies, layers = dict[str, Any](), Counter[str](), list[Any]()
    with Progress() as progress:
        for name in (name for given in checkpoints for name in checkpoints_of((given,), None)):
            spec, copies[name] = model_spec(name, **options), copies[name] + 1
            loaded = spec.load(spec.locate(progress.say), progress.say)
            models[name if copies[name] == 1 else f"{name} #{copies[name]}"] = loaded
            if max(sizes) + new > loaded.window:
                raise UsageError(f"--lengths {max(sizes)} and --new {new}: {name} has a window of {loaded.window:,}")
        for name, loaded in models.items():
            ids = calibration_ids(loaded.model, loaded.tokenizer, loaded.window, content)
            layers.append(costs.outliers(loaded, ids, progress.say).assign(checkpoint=name))
        timings = costs.rates(models, counts, sizes, new, rounds, progress.say)
    report = costs.cost_report(timings, pd.concat(layers))
    printer(report)
    if plot is not None:
        costs.draw_cost(report, plot)
