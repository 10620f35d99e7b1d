"""The target model: brought into data/target, run whole, or read one tensor at a time."""

from eagle3.target.bring import bring_target, default_aux_layers
from eagle3.target.model import load_model, target_logits
from eagle3.target.tokens import end_token_ids, load_tokenizer, special_and_chat_token_ids
from eagle3.target.weights import read_embedding, read_final_norm, read_head

__all__ = [
    "bring_target",
    "default_aux_layers",
    "end_token_ids",
    "load_model",
    "load_tokenizer",
    "read_embedding",
    "read_final_norm",
    "read_head",
    "special_and_chat_token_ids",
    "target_logits",
]
