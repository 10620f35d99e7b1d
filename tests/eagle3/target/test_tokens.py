import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.artifacts import TargetModel
from eagle3.errors import TargetError
from eagle3.target import end_token_ids, load_tokenizer, special_and_chat_token_ids

from .conftest import change_json

Refer = Callable[[], TargetModel]


def test_end_tokens_are_gathered_from_every_place_that_names_them(plain: Path, refer: Refer):
    change_json(plain / "config.json", eos_token_id=5)
    change_json(plain / "generation_config.json", eos_token_id=[7, 0])

    assert end_token_ids(refer()) == {5, 7, 0, 2}


def test_end_tokens_of_a_nested_config_count(plain: Path, refer: Refer):
    change_json(plain / "config.json", text_config={**read(plain), "eos_token_id": 9})

    assert 9 in end_token_ids(refer())


def test_a_target_without_any_end_token_names_the_key(plain: Path, refer: Refer):
    (plain / "generation_config.json").unlink()
    change_json(plain / "config.json", eos_token_id=None)
    change_json(plain / "tokenizer_config.json", eos_token=None)

    with pytest.raises(TargetError, match=r"add `eos_token_id` to .*generation_config.json"):
        end_token_ids(refer())


def test_special_and_template_tokens_are_kept_and_what_is_said_is_not(refer: Refer):
    target = refer()
    tokenizer = load_tokenizer(target)

    kept = special_and_chat_token_ids(target)

    assert kept == sorted(set(kept))
    template = tokenizer.encode("<|im_start|>user\n<|im_start|>assistant\n<|im_start|>system\n")
    assert {0, 1, 2, *template} <= set(kept)
    assert not {*tokenizer.encode("0"), *tokenizer.encode("~")} & set(kept)


def test_a_template_without_system_turns_still_gives_its_tokens(plain: Path, refer: Refer):
    template = (plain / "chat_template.jinja").read_text()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    (plain / "chat_template.jinja").write_text(refusal + template)
    target = refer()

    kept = special_and_chat_token_ids(target)

    assert set(load_tokenizer(target).encode("<|im_start|>assistant\n")) <= set(kept)


def test_ids_beyond_the_head_are_not_kept(plain: Path, refer: Refer):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.add_tokens(["<|beyond|>"])
    tokenizer.save_pretrained(plain)

    assert max(special_and_chat_token_ids(refer())) < 320


def test_a_tokenizer_without_chat_template_is_refused(plain: Path, refer: Refer):
    (plain / "chat_template.jinja").unlink()

    with pytest.raises(TargetError, match=r"no chat template; set target.source to a chat model"):
        load_tokenizer(refer())


def test_a_folder_without_tokenizer_is_refused(plain: Path, refer: Refer):
    for file in plain.glob("tokenizer*"):
        file.unlink()

    with pytest.raises(TargetError, match="holds no tokenizer that can be read"):
        load_tokenizer(refer())


def read(plain: Path) -> dict[str, object]:
    return json.loads((plain / "config.json").read_text())
