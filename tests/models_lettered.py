"""A tiny random model with a tokenizer of single characters, in a folder as ``save_pretrained`` writes it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;-<>_\n"
CHAT_TEMPLATE = "{% for m in messages %}{{ '' if loop.first else '\n' }}<{{ m.role }}>{{ m.content }}{% endfor %}"


def save_lettered_model(folder: Path) -> Path:
    """Write model and tokenizer, and return the folder."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{character: i + 2 for i, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
