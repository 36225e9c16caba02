"""The paper's models: four attentions on three backbones, as Hugging Face models.

The modules of this folder import torch, transformers and each other only, never the rest of evalkit, so that
`evalkit models export` can lay them beside a checkpoint.
"""
