"""Whether one side is better under every prompt of two runs under several prompts.

In: a `Comparison` whose alternatives are prompts. Out: a sentence, and notes.

A side is better under all prompts if it is better under each: the alternative is an intersection. The intersection-
union test rejects its complement if every single test does, at the same level, so that its p value is the largest
(Berger 1982, Multiparameter hypothesis testing and acceptance sampling, Technometrics 24). It needs no correction for
the number of prompts, and the prompts need not be independent.
"""

from __future__ import annotations

from evalkit.comparison.difference_texts import p_text
from evalkit.comparison.differences import DOWN, UP, Comparison, RuleVerdict

PROMPT_NOTES = (
    "mean over prompts: of each document the mean of its values under its prompts (1 or 0: right or wrong)",
    "prompts one by one: a task that lacks a prompt (an order of options that it does not list) counts with the run's "
    "own prompt; p and intervals of single prompts are not corrected for their number",
    "under all prompts: intersection-union test, whose p is the largest of the prompts' and needs no correction "
    "(Berger 1982); the claim is about these prompts, not about others",
)
_MEAN = "mean over prompts"


def prompt_of(rule: str) -> str:
    """Return the prompt of "RULE@PROMPT"; of a rule alone, that it is the mean over them."""
    return rule.partition("@")[2] or _MEAN


def single_prompts(found: Comparison) -> list[RuleVerdict]:
    """Return the verdict under each prompt, without that on the mean."""
    return [one for one in found.rules if "@" in one.rule]


def prompts_sentence(found: Comparison) -> str:
    """Return whether B is better, or worse, than A under all prompts."""
    single = single_prompts(found)
    up, down = (sum(one.average.verdict in verdicts for one in single) for verdicts in (UP, DOWN))
    count, on = len(single), " on average over the tasks" if len(found.tasks) > 1 else ""
    better, worse = found.verdicts
    if count in (up, down):
        last = max(single, key=_p)
        said = f"{found.b} is {better if up else worse} than {found.a} under all {count} prompts{on}"
        return f"{said} (intersection-union test: the largest p is {p_text(last.average.p)}, {prompt_of(last.rule)})."
    if not up and not down:
        sign = -1 if found.measure.higher_is_better is False else 1
        ahead, behind = (sum(sign * side * one.average.difference > 0 for one in single) for side in (1, -1))
        said = f"No difference between {found.b} and {found.a} is shown under any of {count} prompts{on}"
        return f"{said}; {found.b} is ahead under {ahead}, {found.a} under {behind}."
    counts = {better: up, worse: down, "undecided": count - up - down}
    said = ", ".join(f"{verdict} under {number}" for verdict, number in counts.items() if number)
    return (
        f"Of {count} prompts{on}, {found.b} against {found.a} is {said}: neither is shown to be {better} under all of "
        "them."
    )


def _p(one: RuleVerdict) -> float:
    return 1.0 if one.average.p is None else one.average.p
