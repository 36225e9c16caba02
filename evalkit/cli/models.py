"""`evalkit models`: the paper's models by name, and checkpoints made, exported and converted.

The output of these commands is named on the command line only, not by environment variables that are meant for runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.cli.parameters import FOLDER, Commands, argument, typed_option
from evalkit.cli.running import PRINTING, print_report
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format

_TO = typed_option("--output", "-o", type=FOLDER, required=True, help="Folder to write; must be new or empty.")
_PICKLE = typed_option("--allow-pickle", is_flag=True, help="Read pickled weights; they can run code.")


@click.group(cls=Commands)
def models() -> None:
    """The paper's models: list them, show one, make, export and convert checkpoints."""


@models.command(name="ls")
@PRINTING
def list_(form: Format, standalone: bool) -> None:
    """List the models that evalkit knows by name."""
    from evalkit.cli.listing import models_report

    print_report(models_report(), form, standalone)


@models.command()
@argument("model", metavar="NAME|FILE.yaml|FOLDER")
@PRINTING
def show(model: str, form: Format, standalone: bool) -> None:
    """Show a model's shapes, sizes and settings that the papers leave open.

    For a folder that is named like a model, give ./NAME.

    \b
    evalkit models show llama-125m-intg
    evalkit models show my-checkpoint
    evalkit models show my_models.yaml:mine
    """
    from evalkit.cli.listing import model_report

    print_report(model_report(model), form, standalone)


@models.command()
@argument("model", metavar="NAME|FILE.yaml")
@_TO
@typed_option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the weights.")
@typed_option("--dtype", default="float32", show_default=True, help="float32, bfloat16 or float16.")
@typed_option("--tokenizer", help="Folder or hub name to take the tokenizer from.")
@typed_option("--train-tokenizer", "texts", type=FOLDER, multiple=True, metavar="TEXT", help="File or folder of "
              "text to train a tokenizer on instead; may be given several times.")  # fmt: skip
def init(model: str, output: Path, seed: int, dtype: str, tokenizer: str | None, texts: tuple[Path, ...]) -> None:
    """Write a checkpoint with random weights.

    \b
    evalkit models init llama-125m-intg --output CKPT --train-tokenizer corpus.txt
    evalkit models init my_models.yaml:mine --output CKPT --tokenizer org/name --dtype bfloat16
    """
    from evalkit.data.wheels import say_on_stderr
    from evalkit.models.zoo import named_model, write_random

    named = named_model(model)
    write_random(named, output, seed=seed, dtype=dtype, tokenizer=tokenizer, texts=texts, say=say_on_stderr)
    click.echo(printable(f"{named.name}, random weights of seed {seed}, {dtype}: {output}"))


@models.command()
@argument("checkpoint")
@_TO
@_PICKLE
def export(checkpoint: str, output: Path, allow_pickle: bool) -> None:
    """Export an evalkit checkpoint so that it loads without evalkit, by trust_remote_code."""
    from evalkit.data.wheels import say_on_stderr
    from evalkit.models.convert import export as write
    from evalkit.models.locate import locate

    write(locate(checkpoint, allow_pickle=allow_pickle, say=say_on_stderr), output)
    click.echo(printable(f"AutoModelForCausalLM.from_pretrained('{output}', trust_remote_code=True) loads it anywhere"))


@models.command()
@argument("source")
@_TO
@typed_option("--rope", type=click.Choice(["interleaved", "rotate_half"]), help="How the authors' heads rotate, "
              "those of vanilla layers too.  [default: interleaved]")  # fmt: skip
@typed_option("--pairing", type=click.Choice(["adjacent", "halves"]), help="Which of the authors' heads are a pair.  "
              "[default: adjacent]")  # fmt: skip
@_PICKLE
def convert(source: str, output: Path, rope: str | None, pairing: str | None, allow_pickle: bool) -> None:
    """Convert another project's differential checkpoint to evalkit's own format.

    SOURCE is transformers' DiffLlama, or a Llama with the attention of the differential transformer's authors.
    """
    from evalkit.data.wheels import say_on_stderr
    from evalkit.models.convert import convert as write
    from evalkit.models.locate import locate

    write(
        locate(source, allow_pickle=allow_pickle, say=say_on_stderr),
        output,
        rope=rope,
        pairing=pairing,
        say=say_on_stderr,
    )
    click.echo(printable(f"{output}: model type evalkit_llama, differential attention"))
