"""Checkpoints and models: `--model` → located files with a fingerprint → a loaded model with its tokenizer.

Also the paper's attentions (`variants/`), context extension, models in memory, conversion, and the named models. What a
finished run needs imports no torch. `import evalkit.models.auto` registers the paper's model types.
"""
