"""Model files to named arrays, configuration and tokenizer assets; nothing of models.

path = resolve_model("smollm2-135m-instruct")     # a path, org/name, hf:org/name or a built-in name
checkpoint = open_checkpoint(path)                # headers only
checkpoint.tensors["token_embd.weight"].read()    # a numpy array
"""

from jaxserve_checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxserve_checkpoints.errors import CheckpointError, SourceError
from jaxserve_checkpoints.sentence_transformers import EncoderModule
from jaxserve_checkpoints.sources import BUILTIN_MODELS, BuiltinModel, resolve_model
from jaxserve_checkpoints.tensors import PackedLayout, PackedParts, TensorRef
from jaxserve_checkpoints.tokenizers import TokenizerAssets

__all__ = [
    "BUILTIN_MODELS",
    "BuiltinModel",
    "Checkpoint",
    "CheckpointError",
    "EncoderModule",
    "PackedLayout",
    "PackedParts",
    "SourceError",
    "TensorRef",
    "TokenizerAssets",
    "open_checkpoint",
    "resolve_model",
]
