"""The paper's models: four attentions on three backbones, as Hugging Face models.

The modules of this folder import only torch, transformers and each other, never the rest of evalkit, so that
`evalkit models export` can copy them into a checkpoint folder.
"""
