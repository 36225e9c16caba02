"""Register evalkit's model types with transformers' auto classes: `import evalkit.models.auto`.

After it, `AutoConfig` and `AutoModelForCausalLM` load saved models of evalkit's attentions. It imports transformers'
three backbones, so neither `import evalkit` nor the command line imports it before it is needed.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.models.variants.modeling import CLASSES

for model in CLASSES:
    AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
    AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
