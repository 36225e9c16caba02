"""Commands that no input makes right: exit code 2, the options named, and nothing written; more are in snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command, complains

COMMANDS = {
    "run --modle x": ["--modle", "--model"],
    "run CKPT --outcome brier": ["--outcome", "evalkit decide, compare"],
    "compare a b --outcome bpb": ["'bits_per_byte'"],
    "run CKPT --contextmethod yarn": ["--context-method"],
    "run CKPT --context 512 --context-method yran": ["'yarn'"],
    "run --model CKPT --tasks piqa --device cuda:99": ["--device cuda:99"],
    "perplexity CKPT --text file --device cdua": ["--device cdua"],
    "attention CKPT --dtype float33": ["'float32'"],
    "import x": ["x: no such file or folder"],
    "ruler CKPT --lengths 100,0": ["--lengths is 0"],
    "ruler CKPT --lengths 1m": ["--lengths is '1m'"],
    "run --watch . --dry-run": ["--watch and --dry-run"],
    "run --watch . --model demo": ["--model", "--watch"],
    "run --watch . --show-prompts 1": ["--show-prompts", "--watch"],
    "run --watch . --format json": ["--format", "--watch"],
    "run --watch . --plot curve.txt": ["curve.txt", ".pdf"],
    "run demo --until 5": ["--until", "--watch"],
    "run --model CKPT --set limit=3": ["--set", "limit"],
    "run --model CKPT --set lengths=3": ["'lengths'"],
    "run --model CKPT nix-*": ["nix-*"],
    "run CKPT --model CKPT": ["given twice"],
    "run --model a --model b": ["--model", "a, b"],
    "longbench --format latex rescore x": ["longbench rescore"],
    "compare a b --from c --from d --margin 1": ["--from", "the one that it was changed from"],
    "compare a b --given c": ["--given", "--sample"],
    "compare a b --margin=-1": ["--margin", "-1"],
    "compare --curve a b --margin 1": ["--margin", "--curve"],
    "compare --curve a b --pair-seeds": ["--pair-seeds", "--curve"],
    "compare a b --fail-if-worse --margin nan": ["nan"],
    "compare --study s.yaml --group a=b": ["--group"],
    "compare --benchmark zs a b": ["--benchmark needs --study"],
    "report x --sample 3 --without-documents": ["--without-documents and --sample"],
    "report x --study study.yaml --names a": ["--study and --names"],
    "report x --benchmark zs": ["--benchmark needs --study"],
    "figure": ["bos, categories", "--all"],
    "figure entropy x -o a.gif": ["a.gif", ".png, .pdf or .svg"],
    "figure entropy x --measure bos": ["--measure", "entropy"],
    "table": ["main_res", "--audit"],
    "table main_res --source runs": ["--source runs", "--runs", "--study"],
    "table main_res --runs x.yaml": ["--runs x.yaml", "no such file"],
    "table main_res --source published --runs x.yaml": ["--source published"],
    "table main_res --in runs": ["--in needs --runs or --study"],
    "table main_res --stderr": ["--stderr"],
    "table main_res --drop-empty": ["--drop-empty"],
    "table main_res --outcome brier": ["--outcome"],
    "table main_res --source both --runs x.yaml --as-printed": ["--as-printed"],
    "table main_res --benchmark zs": ["--benchmark needs --study"],
    "table main_res --study s.yaml --runs x": ["--study and --runs"],
    "table main_res --study s.yaml --source published": ["--study", "--source runs or both"],
    "table --audit --as-printed": ["--audit and --as-printed"],
    "table --audit --study s.yaml": ["--audit and --study"],
    "table --all": ["--all needs --output"],
    "table --all main_res -o x": ["--all", "main_res"],
    "table --all --audit -o x": ["--all and --audit"],
    "study run s.yaml --dry-run --wait": ["--wait"],
    "study run s.yaml --dry-run --ray auto": ["--ray"],
    "models init llama-125m-intg": ["--output"],
    "models init llama-125m-intg -o x": ["--train-tokenizer"],
    "models init llama-125m-intg -o . --train-tokenizer file": ["--output ."],
    f"models init llama-125m-intg -o x --seed {2**63} --train-tokenizer file": ["--seed"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_invalid_commands(
    evalkit: Command, checkpoint: Path, documents: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("file").touch()
    Path("s.yaml").write_text("checkpoints: {a: demo}\nbenchmarks: {zs: {suite: zeroshot8}}\n", encoding="utf-8")
    more = ["--data-dir", documents, "--allow-unofficial-data"] if "run --model CKPT" in command else []
    outcome = evalkit(*command.replace("CKPT", str(checkpoint)).split(), *more)
    complains(outcome, 2, *COMMANDS[command])
    assert sorted(path.name for path in Path().iterdir() if path.name != "cache") == ["file", "s.yaml"]
