"""The target's tokenizer, and which of its tokens steer a chat: end, special, template."""

from pathlib import Path
from typing import Any

from eagle3.artifacts import TargetModel
from eagle3.errors import TargetError
from eagle3.target.folder import CONFIG, GENERATION_CONFIG, read_json, text_config, trusted_folder
from eagle3.target.quiet import quiet_transformers


def load_tokenizer(target: TargetModel, home: Path = TargetModel.home) -> Any:
    """The target's own tokenizer, from its folder alone.

    Raises:
        TargetError: the folder holds none, or it has no chat template.
        ArtifactError: the folder is gone, or its code changed since it was pinned.
    """
    from transformers import AutoTokenizer

    folder = trusted_folder(target, home)
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=target.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise TargetError(
                f"{folder} holds no tokenizer that can be read ({error}); fetch the model again"
            ) from error
    if not tokenizer.chat_template:
        raise TargetError(
            f"the tokenizer in {folder} has no chat template; set target.source to a chat model, "
            "or add chat_template.jinja to it"
        )
    return tokenizer


def end_token_ids(target: TargetModel, home: Path = TargetModel.home) -> frozenset[int]:
    """Ids that end a turn: those of the generation config, the config and the tokenizer together.

    Models name them in different places: Llama 3 has three, in its generation config only.

    Raises:
        TargetError: none of the three names any.
    """
    folder = target.folder(home)
    config = read_json(folder / CONFIG)
    named = [config.get("eos_token_id"), text_config(config).get("eos_token_id")]
    if (folder / GENERATION_CONFIG).is_file():
        named.append(read_json(folder / GENERATION_CONFIG).get("eos_token_id"))
    named.append(load_tokenizer(target, home).eos_token_id)
    ids = {id_ for value in named for id_ in (value if isinstance(value, list) else [value])}
    ends = frozenset(int(id_) for id_ in ids if id_ is not None)
    if not ends:
        raise TargetError(
            f"{folder} names no end-of-turn token; "
            f"add `eos_token_id` to {folder / GENERATION_CONFIG}"
        )
    return ends


def special_and_chat_token_ids(target: TargetModel, home: Path = TargetModel.home) -> list[int]:
    """Ids that a draft vocabulary always keeps: special, added, template and end tokens.

    Ascending, and below the target's vocabulary size.
    """
    tokenizer = load_tokenizer(target, home)
    ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids |= _template_token_ids(tokenizer)
    ids |= end_token_ids(target, home)
    # A tokenizer may know more tokens than the head has rows.
    return sorted(id_ for id_ in ids if id_ < target.vocab_size)


def _template_token_ids(tokenizer: Any) -> set[int]:
    """What the template itself writes: tokens that stay when what is said in the chat changes."""
    said_one_way, said_another = (_rendered(tokenizer, text) for text in ("0", "~"))
    return said_one_way & said_another


def _rendered(tokenizer: Any, text: str) -> set[int]:
    from jinja2 import TemplateError

    turns = [{"role": role, "content": text} for role in ("system", "user", "assistant")]
    ids: set[int] = set()
    for chat in (turns, turns[1:], turns[1:2]):
        try:
            ids.update(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            )
        except TemplateError:
            # Some templates know no system turn.
            if chat is not turns:
                raise
    return ids
