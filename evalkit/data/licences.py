"""Licences of the datasets that evalkit's benchmarks read. In: a repository on the hub. Out: its `Licence`, if known.

Each was read on the dataset's own page or in its authors' repository. A licence that neither states is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Licence:
    """Licence of a dataset."""

    name: str
    url: str
    """The licence's text, or the page of the authors that names it."""
    authors: str
    """Who to credit."""
    limits: str = ""
    """What the licence does not cover."""


LICENCES = {
    "allenai/winogrande": Licence("CC BY", "https://github.com/allenai/winogrande#license", "Sakaguchi et al. 2019"),
    "allenai/ai2_arc": Licence("CC BY-SA 4.0", "https://creativecommons.org/licenses/by-sa/4.0/", "Clark et al. 2018"),
    "Rowan/hellaswag": Licence(
        "MIT",
        "https://github.com/rowanz/hellaswag",
        "Zellers et al. 2019",
        "texts from WikiHow have a licence of their own",
    ),
    "baber/piqa": Licence("AFL 3.0", "https://opensource.org/license/afl-3-0-php", "Bisk et al. 2019"),
    "aps/super_glue": Licence(
        "CC BY-SA 3.0", "https://creativecommons.org/licenses/by-sa/3.0/", "Clark et al. 2019", "for BoolQ"
    ),
    "cais/mmlu": Licence("MIT", "https://github.com/hendrycks/test/blob/master/LICENSE", "Hendrycks et al. 2020"),
    "THUDM/LongBench": Licence(
        "MIT",
        "https://github.com/THUDM/LongBench/blob/main/LICENSE",
        "Bai et al. 2023",
        "for the collection; its parts have licences of their own",
    ),
}
"""Repository on the hub → licence."""
