"""Loading: `--model` → located files with a fingerprint → checks → a model and its tokenizer on its device."""
