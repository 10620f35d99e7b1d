"""Which lines of the contract a drafter's config.json breaks."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from eagle3.contract import (
    AUX_STATES,
    CONFIG_FILE,
    FIXED,
    LAYER_IDS,
    NESTED,
    NORM_SWITCHES,
    NOT_IN_THE_TABLE,
    SIZES,
    default_layer_ids,
    from_output_ids,
    is_speculators,
    plain_view,
    rope_parameters,
)
from eagle3.fault import Fault
from eagle3.target_facts import TargetFacts

Config = Mapping[str, Any]

IMPORT = "convert it with `eagle3 import DIR OUT`"
SPECULATORS_OWN = ("architectures", "torch_dtype")
"""Fixed keys of the plain format that vLLM sets itself for the speculators format."""


def config_faults(
    config: Config, target: TargetFacts | None, trained: Config | None
) -> Iterator[Fault]:
    """Name every fault of a parsed config.json.

    `trained` is the `drafter` section that our own record beside it holds, if there is one: it says
    which network the weights are of.
    """
    view = plain_view(config)
    yield from _fixed(config, view)
    yield from _sizes(view)
    yield from _sizes_agree(view)
    yield from _rope(view)
    yield from _switches(config, view, trained)
    yield from _ids_stand_twice(config)
    yield from _ids_fit(view, target)
    if is_speculators(config):
        yield from _speculators(config)
    if target is not None:
        yield from _target_sizes(view, target)


def sizes_are_usable(view: Config) -> bool:
    """Whether the sizes suffice to say which tensors there must be."""
    return not [*_sizes(view), *_sizes_agree(view)]


def _key(name: str) -> str:
    return f"{CONFIG_FILE}: {name}"


def _fixed(config: Config, view: Config) -> Iterator[Fault]:
    for key, wanted in FIXED.items():
        if is_speculators(config) and key in SPECULATORS_OWN:
            continue
        if key not in view or view[key] != wanted:
            found = "is missing" if key not in view else f"is {view[key]!r}"
            yield Fault(_key(key), found, f"write {wanted!r}")


def _sizes(view: Config) -> Iterator[Fault]:
    for key in SIZES:
        value = view.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            found = "is missing" if key not in view else f"is {value!r}"
            yield Fault(_key(key), found, f"write the drafter's; {IMPORT}")
    epsilon = view.get("rms_norm_eps")
    if not isinstance(epsilon, int | float) or epsilon <= 0:
        found = "is missing" if epsilon is None else f"is {epsilon!r}"
        yield Fault(
            _key("rms_norm_eps"), found, "write the value that the drafter was trained with"
        )


def _sizes_agree(view: Config) -> Iterator[Fault]:
    width, target_width = view.get("hidden_size"), view.get("target_hidden_size")
    if target_width is not None and target_width != width:
        yield Fault(
            _key("target_hidden_size"),
            f"is {target_width!r}, hidden_size {width!r}: engines share the target's embedding, so "
            "the two must be one",
            "write the target's width in both",
        )
    drafted, vocab = view.get("draft_vocab_size"), view.get("vocab_size")
    if isinstance(drafted, int) and isinstance(vocab, int) and drafted > vocab:
        yield Fault(
            _key("draft_vocab_size"),
            f"is {drafted}, above vocab_size {vocab}",
            "vocab_size is the target's, draft_vocab_size the rows of lm_head",
        )
    heads, groups = view.get("num_attention_heads"), view.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        yield Fault(
            _key("num_key_value_heads"),
            f"is {groups}, which does not divide num_attention_heads {heads}",
            "write the sizes that the drafter was trained with",
        )


def _rope(view: Config) -> Iterator[Fault]:
    legacy = [key for key in ("rope_theta", "rope_scaling") if key not in view]
    for key in legacy:
        yield Fault(
            _key(key), "is missing, and readers before transformers 5 know no other", IMPORT
        )
    new = view.get("rope_parameters")
    if not isinstance(new, Mapping):
        yield Fault(
            _key("rope_parameters"), "is missing, and transformers 5 ignores rope_theta", IMPORT
        )
    elif not legacy:
        wanted = rope_parameters(view["rope_theta"], view["rope_scaling"])
        if dict(new) != wanted:
            yield Fault(
                _key("rope_parameters"),
                f"is {dict(new)}, but rope_theta and rope_scaling say {wanted}",
                "write the same RoPE in both spellings",
            )


def _switches(config: Config, view: Config, trained: Config | None) -> Iterator[Fault]:
    for key in NOT_IN_THE_TABLE:
        if view.get(key):
            yield Fault(
                _key(key),
                f"is {view[key]!r}, which asks the engine for tensors that this contract has not",
                "write false, or serve this drafter as its trainer says",
            )
    if view.get("quantization_config"):
        yield Fault(
            _key("quantization_config"), "is set, but weights are bfloat16", "remove the key"
        )
    states = view.get("num_aux_hidden_states", AUX_STATES)
    if states != AUX_STATES:
        yield Fault(_key("num_aux_hidden_states"), f"is {states!r}", f"write {AUX_STATES}")
    for key in NORM_SWITCHES:
        value = view.get(key, False)
        if not isinstance(value, bool):
            yield Fault(_key(key), f"is {value!r}", "write true or false")
        elif trained is not None and value != bool(trained.get(key)):
            found = f"is {value}" if key in config else f"is missing, which means {value}"
            way = "without" if value else "with"
            fix = f"write {str(not value).lower()}: it was trained {way} it"
            yield Fault(_key(key), found, fix)


def _ids_stand_twice(config: Config) -> Iterator[Fault]:
    nested = config.get(NESTED)
    inner = nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None
    if isinstance(nested, Mapping) and not nested.get("use_aux_hidden_state", True):
        yield Fault(
            _key(f"{NESTED}.use_aux_hidden_state"), "is false: fc is then not used", "write true"
        )
    if LAYER_IDS not in config:
        what = f"stands in {NESTED} only" if inner is not None else "is missing"
        yield Fault(_key(LAYER_IDS), f"{what}, and vLLM's newer runner reads the top level", IMPORT)
    # SGLang, which reads the nested ids, does not load the speculators format.
    elif inner is None and not is_speculators(config):
        yield Fault(_key(f"{NESTED}.{LAYER_IDS}"), "is missing, and SGLang reads no other", IMPORT)
    elif inner is not None and inner != config[LAYER_IDS]:
        yield Fault(
            _key(f"{NESTED}.{LAYER_IDS}"),
            f"is {inner}, but the top level says {config[LAYER_IDS]}",
            "write the same ids in both places",
        )


def _ids_fit(view: Config, target: TargetFacts | None) -> Iterator[Fault]:
    nested = view.get(NESTED)
    ids = view.get(LAYER_IDS, nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None)
    if ids is None:
        return
    where = _key(LAYER_IDS)
    whole = isinstance(ids, list) and all(type(layer) is int and layer >= 0 for layer in ids)
    if not whole or len(ids) != AUX_STATES or any(a >= b for a, b in pairwise(ids)):
        yield Fault(
            where, f"is {ids!r}", f"write {AUX_STATES} rising ids of layers, such as 2, 15, 27"
        )
    elif target is None:
        # No default in our convention starts with 1: SGLang, too, takes a first id of 1 as a sign.
        if ids[0] == 1:
            yield _one_off(where, ids, list(from_output_ids(ids)))
    elif ids[-1] > target.num_layers:
        yield Fault(
            where, f"is {ids}, but the target has {target.num_layers} layers", "write its ids"
        )
    elif target.aux_layers is not None:
        if tuple(ids) != target.aux_layers:
            yield Fault(
                where,
                f"is {ids}, but {target.folder} is extracted at {list(target.aux_layers)}",
                "write the ids that the drafter was trained on",
            )
    else:
        expected = list(default_layer_ids(target.num_layers))
        if ids in ([layer - 1 for layer in expected], [layer + 1 for layer in expected]):
            yield _one_off(where, ids, expected)


def _one_off(where: str, ids: list[int], ours: list[int]) -> Fault:
    return Fault(
        where,
        f"is {ids}, one off: ids count the layers that have run, as vLLM reads them",
        f"write {ours}; {IMPORT}",
    )


def _target_sizes(view: Config, target: TargetFacts) -> Iterator[Fault]:
    wanted = {
        "vocab_size": target.vocab_size,
        # The embedding is the target's own, so the drafter's width is too.
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
    }
    for key, size in wanted.items():
        if key in view and view[key] is not None and view[key] != size:
            yield Fault(
                _key(key),
                f"is {view[key]!r}, but the target's is {size}",
                f"write {size}, or name the target that this drafter was trained for",
            )


def _speculators(config: Config) -> Iterator[Fault]:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        yield Fault(_key("speculators_model_type"), f"is {kind!r}", "write 'eagle3'")
    if "norm_before_residual" not in config:
        yield Fault(
            _key("norm_before_residual"), "is missing, which this format reads as True", "write it"
        )
    if not isinstance(config.get("transformer_layer_config"), Mapping):
        yield Fault(
            _key("transformer_layer_config"), "is missing", "export it again with `eagle3 export`"
        )
    outer = config.get("speculators_config")
    methods = outer.get("proposal_methods") if isinstance(outer, Mapping) else None
    if not methods or not isinstance(methods[0].get("speculative_tokens"), int):
        yield Fault(
            _key("speculators_config.proposal_methods"),
            "names no speculative_tokens, without which vLLM does not start",
            "export it again with `eagle3 export`",
        )
    verifier = outer.get("verifier") if isinstance(outer, Mapping) else None
    if not isinstance(verifier, Mapping) or not verifier.get("name_or_path"):
        yield Fault(
            _key("speculators_config.verifier"),
            "names no target, without which vLLM does not start",
            "export it again with `eagle3 export`",
        )
