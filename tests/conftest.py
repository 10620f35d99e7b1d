"""A target model small enough for any test: built once a session, a real Hugging Face folder."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_params import jsonl_source, tiny_params_tree
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle3.config import Params, TargetParams, check_params
from eagle3.target.quiet import quiet_transformers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# As SmolLM2's: one turn per message, a default system turn, and a newline after the end token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SUBJECTS = ["the sea", "a tree", "our street", "the moon", "a clock", "the river", "a fox", "tea"]
QUESTIONS = [
    "What is {} like?",
    "Tell me of {}.",
    "Why do people like {}?",
    "How old is {}?",
    "Who knows {}?",
]
ANSWERS = ["It is much as you think.", "Old, and quite calm.", "Nobody has asked before."]


def tiny_chats() -> list[dict[str, Any]]:
    """Forty different conversations, some with two turns and some with a system turn."""
    chats = []
    for number, (subject, question) in enumerate((s, q) for s in SUBJECTS for q in QUESTIONS):
        messages = [
            {"role": "user", "content": question.format(subject)},
            {"role": "assistant", "content": ANSWERS[number % 3]},
        ]
        if number % 4 == 1:
            messages.insert(0, {"role": "system", "content": "Be short."})
        if number % 5 == 2:
            messages.append({"role": "user", "content": f"And {SUBJECTS[(number + 1) % 8]}?"})
            messages.append({"role": "assistant", "content": ANSWERS[(number + 1) % 3]})
        chats.append({"messages": messages})
    return chats


def save_tiny_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE tokenizer with the chat template; returns its size."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [turn["content"] for chat in tiny_chats() for turn in chat["messages"]]
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that processes that share them (`make test`) end together."""
    flows = Path(__file__).parent / "flows"
    items.sort(key=lambda item: flows not in item.path.parents)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_reaches_children() -> None:
    """A shell starts background jobs with SIGINT ignored, and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama's folder: 8 layers, hidden 32, 320 tokens, untied, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-target")
    vocab_size = save_tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        # Wide enough that the two best logits are far apart: no near-ties in greedy text.
        initializer_range=0.25,
        dtype="float32",
    )
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_target_params(tiny_target: Path) -> TargetParams:
    """The `target` section that takes the tiny target from its folder."""
    return TargetParams.model_validate(tiny_params_tree(tiny_target)["target"])


@pytest.fixture
def tiny_params(tiny_target: Path, tmp_path: Path) -> Params:
    """params.yaml cut down to a pipeline of seconds; its chats lie in tmp_path/chats.jsonl."""
    chats, held_out = tmp_path / "chats.jsonl", tmp_path / "held-out.jsonl"
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in tiny_chats()))
    held_out.write_text('{"prompt": "What does a lamp do?"}\n{"prompt": "Is a road long?"}\n')
    raw = tiny_params_tree(tiny_target)
    raw["corpus"]["sources"] = [
        jsonl_source(chats, "chat", "by-hash"),
        jsonl_source(held_out, "held-out", "eval"),
    ]
    return check_params(raw, "tiny_params")
