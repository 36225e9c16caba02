"""Paths from a root, a home folder or ".." lose their folders; other texts stay as they are."""

from __future__ import annotations

import time

import pytest

from evalkit.exchange.exports import without_folders

IN_TEXT = {
    "/home/alice/ckpt": "ckpt",
    "/home/alice/": "alice",
    "//home/alice/ckpt": "ckpt",
    "../alice/ckpt": "ckpt",
    "../../alice/ckpt/": "ckpt",
    "runs/../../alice/ckpt": "ckpt",
    "~/private/ckpt": "ckpt",
    "~alice/ckpt": "ckpt",
    "file:///home/alice/x": "x",
    r"\\server\alice\x": "x",
    r"C:\Users\alice\x": "x",
    "C:/Users/alice/x": "x",
    "a.txt,/home/alice/b.txt": "a.txt,b.txt",
    "['/home/alice/x', \"/home/alice/y\"]": "['x', \"y\"]",
    "(/home/alice/x)": "(x)",
    "texts: /home/alice/x; ~/y": "texts: x; y",
    "PATH=/home/alice/bin:/opt/bin": "PATH=bin:bin",
    "a /x/y then /z/w": "a y then w",
}
KEPT = [
    "examples/replication/trained/a/model", "./a/model", "a.../b/c", "yes / no / maybe", "yes/no/maybe", "[/INST]",
    "</s>", "/think", "https://example.org/a/b", "see https://example.org/~a/b.", "hf://datasets/a/b", "s3://a/b/c",
    r"(\w+)", r"\\boxed\{x\}", "1/2", "A: B/C", "", "/", "HuggingFaceTB/SmolLM2-135M@main", "acc/norm",
]  # fmt: skip


@pytest.mark.parametrize("text", IN_TEXT)
def test_paths_in_a_text(text: str) -> None:
    assert without_folders(text) == IN_TEXT[text]
    assert without_folders([{"facts": f"at {text} and"}]) == [{"facts": f"at {IN_TEXT[text]} and"}]


@pytest.mark.parametrize("text", KEPT)
def test_texts_without_paths(text: str) -> None:
    for key in ("facts", "command", "model", "source"):
        assert without_folders({key: [text]}) == {key: [text]}


def test_paths_with_spaces() -> None:
    given = {
        "model": "/home/alice smith/my models/ckpt/",
        "path": r"C:\Users\alice smith\ckpt",
        "command": ["run", "--output=/my runs/a b", "a.txt,/my texts/b c.txt,../my texts/d.txt", "~/my texts/a",
                    "lr=0.1/step,2"],
        "documents": {
            "piqa": {"source": "data-dir /my data/x.jsonl", "count": 3},
            "own": {"source": "json /my data/x.jsonl, /my data/y.jsonl; data-dir /my data/z.jsonl"},
            "text": {"source": "/my data/x.txt"},
        },
        "config": {"data_files": {"test": ["/my data/x.jsonl"]}, "model_args": "pretrained=/my data/m,dtype=float32"},
    }  # fmt: skip
    assert without_folders(given) == {
        "model": "ckpt",
        "path": "ckpt",
        "command": ["run", "--output=a b", "a.txt,b c.txt,d.txt", "a", "lr=0.1/step,2"],
        "documents": {
            "piqa": {"source": "data-dir x.jsonl", "count": 3},
            "own": {"source": "json x.jsonl, y.jsonl; data-dir z.jsonl"},
            "text": {"source": "x.txt"},
        },
        "config": {"data_files": {"test": ["x.jsonl"]}, "model_args": "pretrained=m,dtype=float32"},
    }


def test_keys() -> None:
    """Two that would be equal stay two."""
    assert without_folders({"/home/alice/x": 1, "/home/bob/x": 2, "a/b": 3}) == {"x": 1, "x (2)": 2, "a/b": 3}


@pytest.mark.parametrize("text", ["/a" * 20_000 + "/", "a, " * 20_000, "../" * 20_000, "a/" * 20_000, "=" * 60_000])
def test_long_texts_take_no_time(text: str) -> None:
    began = time.process_time()
    without_folders({"source": text, "command": text, "facts": text})
    assert time.process_time() - began < 5
