"""What float8 does to the states that a drafter and its training see, without training anything.

    python benchmarks/float8_inputs.py --project . --size 32000

On the validation rows of a finished demo: its trained drafter replayed with the bfloat16 states and
with the same ones through float8 (acceptance length, k = 3), and the target's own prediction, which
training aims at, from the last state either way (KL in nats a token, share of equal argmax).
What training *on* float8 costs is benchmarks/float8_acceptance.py.

Shapes: n tokens, H target width, V target vocabulary.
"""

import argparse
import os
from pathlib import Path

from store_results import keep
from torch import Tensor

from eagle3.acceptance import Tally
from eagle3.artifacts import Corpus, Drafter, HiddenStates, TargetModel
from eagle3.config import parse_size
from eagle3.pair import load_checked_drafter
from eagle3.replay import StateReader, replay_rows
from eagle3.store.packing import from_float8, to_float8
from eagle3.store.rows import load_rows
from eagle3.store.states import StateStore
from eagle3.target import read_embedding, read_final_norm, read_head, target_logits

K = 3
TOKENS = 1024


def through_float8(read: StateReader) -> StateReader:
    """The same states as a float8 store would give them."""

    def read_rounded(start: int, stop: int) -> tuple[Tensor, Tensor]:
        aux_n3H, last_nH = read(start, stop)
        return from_float8(*to_float8(aux_n3H)), from_float8(*to_float8(last_nH))

    return read_rounded


def predictions(target: TargetModel, read: StateReader) -> dict[str, float]:
    """How far the target's predictions move, over the first tokens of the split."""
    norm_H, eps = read_final_norm(target)
    head_VH = read_head(target).float()
    logps_nV = [
        target_logits(last_nH, norm_H.float(), eps, head_VH).log_softmax(dim=-1)
        for _, last_nH in (read(0, TOKENS), through_float8(read)(0, TOKENS))
    ]
    exact_nV, rounded_nV = logps_nV
    kl_n = (exact_nV.exp() * (exact_nV - rounded_nV)).sum(dim=-1)
    same_n = exact_nV.argmax(dim=-1) == rounded_nV.argmax(dim=-1)
    return {
        "kl_nats": round(kl_n.mean().item(), 5),
        "equal_argmax": round(same_n.float().mean().item(), 4),
    }


def main() -> None:
    """Replay and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, required=True, help="A finished demo.")
    parser.add_argument("--size", default="32000")
    args = parser.parse_args()
    repository = Path.cwd()
    os.chdir(args.project)
    target = TargetModel.load(TargetModel.home)
    net, maps = load_checked_drafter(Drafter.load(Drafter.home(parse_size(args.size))), target)
    rows = load_rows(Corpus.home / "validation.zarr")
    store = StateStore.open(HiddenStates.home / "validation.zarr")
    read = store.read
    embedding_VH = read_embedding(target).float()
    found = {}
    for name, reader in (("bfloat16", read), ("float8", through_float8(read))):
        which = store.rows_with_states(rows)
        tallies = replay_rows(net.eval(), embedding_VH, maps, rows, reader, (K,), which)
        total = sum((tally[K] for tally in tallies.values()), Tally.empty(K))
        found[name] = round(total.acceptance_length, 4)
    facts = {
        "acceptance_length_k3": found,
        "rows": len(rows),
        "predictions": predictions(target, read),
    }
    os.chdir(repository)
    keep("float8_inputs", args.size, facts)


if __name__ == "__main__":
    main()
