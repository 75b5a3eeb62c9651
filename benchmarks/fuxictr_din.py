# /// script
# requires-python = ">=3.11"
# dependencies = ["fuxictr==2.3.10"]
# ///
"""GEM against FuxiCTR's DIN on the Complete Journey log: training speed (the default), and DIN's quality (`--quality`).

    nox -s bench -- fuxictr_din [--recipe recipes/completejourney-full.yaml] [--rows 60000] [--repeats 3] [--threads 1]
    nox -s bench -- fuxictr_din --quality

DIN is the one in FuxiCTR's wheel with FuxiCTR's own defaults (attention MLP 64 with Dice, 512-128-64 layers, Adam), its
trainer and its NPZ loader. It gets what GEM gets: the standardised dense features, the ids of row and request, and the
newest 64 purchases before the request, whose type, category, department and brand its target attention compares with
the ad's. It gets no product id: a trainable one overfits. Only in-store rows are used, objective `purchase`.

Speed: both train one pass over the same rows (whole requests of the training split), each run in a process of its own,
in turn; the time counts from the end of the third step, waits for the loader and its worker process included.
Quality: learning rate and number of epochs are chosen on the validation split. State is kept in `--work` after each
block of rows, so an interrupted `--quality` goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from fuxictr import __version__ as FUXICTR
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from model_zoo.LongCTR import DIN
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from gem_core.data.batch import Batch, Jagged
from gem_core.data.completejourney import CompleteJourneyReader
from gem_core.data.completejourney.reader import SCHEMA
from gem_core.data.readers import ParquetReader
from gem_core.data.readers.base import SPLITS
from gem_core.plugins import default_registry
from gem_core.protocols import Callback
from gem_core.recipe import load, parse
from gem_core.report.environment import environment
from gem_core.schema import Schema
from gem_core.train import Trainer

TASK = "purchase"
TARGET = ["type", "category", "department", "brand"]
"""What the target attention compares: features of the ad, and fields of its events."""
HISTORY, WIDTH = 64, 16
"""Events of a history; width of every embedding."""
BLOCK = 40_000
"""Rows of an NPZ file; state is saved after each."""
WARM_UP = 3
"""Steps of a timed pass that do not count: they start the worker process and load code."""
LEARNING_RATES = (1e-3, 5e-4)
EPOCHS = 2

# ---- the log, as both sides read it ----------------------------------------------------------------------------------


def log_options(folder: Path, rows: Path | None = None, events: tuple[str, ...] = (TASK,)) -> dict[str, Any]:
    """Options of the Parquet reader for the prepared log: with its split, or all `rows` for training."""
    options: dict[str, Any] = {
        "rows": str(rows or folder / "rows.parquet"),
        "events": {event: str(folder / "events" / f"{event}.parquet") for event in events},
        "unlabelled": "drop",
    }
    return options if rows else options | {"split": {"column": "split"}}


def in_store(schema: Schema) -> Schema:
    """What DIN is given: the objective's rows and their features, without those of coupons."""
    value = schema.model_dump(mode="json", exclude_defaults=True)
    bought = value["events"][TASK]
    fields = {name: bought["fields"][name] for name in TARGET}
    value["objectives"] = {TASK: value["objectives"][TASK]}
    value["events"] = {TASK: bought | {"fields": fields, "max_length": HISTORY}}
    others = ("product", "coupon", "campaign")
    value["sparse"] = {name: f for name, f in value["sparse"].items() if not name.startswith(others)}
    dense = {name: f for name, f in value["dense"].items() if not name.startswith("coupon")}
    value["dense"] = {name: f | {"encoding": "linear"} for name, f in dense.items()}
    return Schema.parse(value)


def sample(folder: Path, out: Path, wanted: int) -> int:
    """Write about `wanted` in-store training rows, whole requests in the log's order; returns how many."""
    keys = pq.read_table(folder / "rows.parquet", columns=["request_id", "split", "coupon"])
    keep = (keys["split"].to_numpy() == "train") & keys["coupon"].is_null().to_numpy()
    requests, counts = np.unique(keys["request_id"].to_numpy()[keep], return_counts=True)
    order = np.random.default_rng(0).permutation(len(requests))
    chosen = requests[order[np.cumsum(counts[order]) <= wanted]]
    keep &= np.isin(keys["request_id"].to_numpy(), chosen)
    file, first = pq.ParquetFile(folder / "rows.parquet"), 0
    with pq.ParquetWriter(out, file.schema_arrow) as writer:
        for batch in file.iter_batches(1 << 16):
            writer.write_batch(batch.filter(keep[first : first + len(batch)]))
            first += len(batch)
    return int(keep.sum())


# ---- FuxiCTR's side: files, feature map, model -----------------------------------------------------------------------


def ad(name: str) -> str:
    """FuxiCTR's name of a target feature; a module of torch cannot have a part called "type"."""
    return f"ad_{name}"


def history(name: str) -> str:
    """FuxiCTR's name of a field of the events."""
    return f"history_{name}"


def one_a_row(ids: Jagged) -> npt.NDArray[np.float32]:
    """(n,) ids, from 1 on: 0 is FuxiCTR's padding."""
    return (ids.values + 1).numpy().astype(np.float32)


def columns(schema: Schema, batch: Batch) -> dict[str, npt.NDArray[np.float32]]:
    """A batch as FuxiCTR's columns, every row with its request's features and padded history of its own."""
    request = batch.request.numpy()
    dense = np.nan_to_num(batch.dense.numpy())  # standardised: 0 is the mean
    request_dense = np.nan_to_num(batch.request_dense.numpy())[request]
    out = dict(zip(schema.names("dense", "row"), dense.T, strict=True))
    out |= dict(zip(schema.names("dense", "request"), request_dense.T, strict=True))
    out |= {ad(name) if name in TARGET else name: one_a_row(ids) for name, ids in batch.ids.items()}
    out |= {name: one_a_row(ids)[request] for name, ids in batch.request_ids.items()}
    out["surface"] = one_a_row(Jagged(batch.surface, torch.empty(0), 1))
    for name in TARGET:
        ids = batch.events[TASK][name]
        lengths = ids.lengths().numpy()
        padded = np.zeros((len(lengths), HISTORY), np.float32)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        padded[owner, np.arange(len(owner)) - ids.offsets.numpy()[owner]] = one_a_row(ids)
        out[history(name)] = padded[request]
    out[TASK] = batch.labels[TASK].numpy()
    return out


def export(reader: ParquetReader, split: str, folder: Path, rows: int = BLOCK) -> None:
    """Write a split as NPZ files of about so many rows; training requests are shuffled over them."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, batch in enumerate(reader.iterate(split, batch_rows=rows)):
        arrays: dict[str, Any] = columns(reader.schema, batch)
        np.savez(folder / f"{split}-{i:03d}.npz", **arrays)


def feature_map(schema: Schema, folder: Path) -> Any:
    """FuxiCTR's description of the columns; a history shares the embedding of the ad's feature."""
    out = FeatureMap("completejourney", str(folder))
    out.labels, out.default_emb_dim = [TASK], WIDTH
    sizes = {name: schema.table_rows(schema.table_of(name)) + 1 for name in schema.sparse}
    sizes["surface"] = len(schema.surface_names()) + 1
    for name in schema.dense:
        out.features[name] = {"type": "numeric", "source": ""}
    for name, size in sizes.items():
        source = {"source": "item"} if name in TARGET else {"source": ""}
        ids = {"type": "categorical", "padding_idx": 0, "vocab_size": size}
        out.features[ad(name) if name in TARGET else name] = ids | source
    for name in TARGET:
        shared = {"share_embedding": ad(name), "padding_idx": 0, "vocab_size": sizes[name]}
        # No output of its own: the attention's result has the ad's width, and DIN counts that itself.
        sequence = {"type": "sequence", "source": "history", "max_len": HISTORY, "emb_output_dim": 0}
        out.features[history(name)] = sequence | shared
    out.num_fields = out.get_num_fields()
    out.set_column_index()
    return out


class Din(DIN):  # type: ignore[misc]  # FuxiCTR has no annotations
    """FuxiCTR's DIN fed from flat columns; `steps` are the moments of the steps of the last `fit`."""

    steps: list[Clock]

    def __init__(self, features: Any, folder: Path, learning_rate: float) -> None:
        super().__init__(
            features,
            learning_rate=learning_rate,
            embedding_dim=WIDTH,
            optimizer="adam",
            loss="binary_cross_entropy",
            model_root=str(folder),
            metrics=["AUC", "logloss"],
            verbose=0,
        )
        Path(self.model_dir).mkdir(parents=True, exist_ok=True)
        self.steps = []

    def train_step(self, batch_data: dict[str, Tensor]) -> Tensor:
        """FuxiCTR's step, and a look at the clock."""
        loss: Tensor = super().train_step(batch_data)
        self.steps.append(Clock())
        return loss

    def get_inputs(self, inputs: dict[str, Tensor], feature_source: None = None) -> tuple[Any, Any, Tensor]:
        """Features of the row, those of history and ad (the ad last), and the history's mask."""
        histories = {name: inputs[history(name)] for name in TARGET}
        items = {ad(name): torch.cat([h, inputs[ad(name)][:, None]], 1).flatten() for name, h in histories.items()}
        others = {TASK, *map(ad, TARGET), *map(history, TARGET)}
        rows = {name: values for name, values in inputs.items() if name not in others}
        return rows, items, (histories[TARGET[0]] > 0).float()

    def get_labels(self, inputs: dict[str, Tensor]) -> Tensor:
        """(B, 1)."""
        labels: Tensor = BaseModel.get_labels(self, inputs)
        return labels

    def eval_step(self) -> None:
        """What `fit` does after the last step, to choose the best weights: here, keep them as they are."""
        self.save_weights(self.checkpoint)


def loader(features: Any, path: Path, batch_rows: int, shuffle: bool) -> Any:
    """FuxiCTR's loader of an NPZ file, with one worker process."""
    stage = {"stage": "train", "train_data": str(path)} if shuffle else {"stage": "test", "test_data": str(path)}
    found = RankDataLoader(features, batch_size=batch_rows, shuffle=shuffle, data_format="npz", num_workers=1, **stage)
    return found[0] if shuffle else found


# ---- speed -----------------------------------------------------------------------------------------------------------


class Clock:
    """A moment: wall-clock time, processor time of this process, and that of its ended worker processes."""

    def __init__(self) -> None:
        self.wall = time.perf_counter()
        self.processor = _processor(resource.RUSAGE_SELF)
        self.workers = _processor(resource.RUSAGE_CHILDREN)


def _processor(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


class Steps(Callback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.steps: list[Clock] = []

    def on_step(self, trainer: Any, step: int) -> None:
        """After each step."""
        self.steps.append(Clock())


def figures(steps: list[Clock], rows: int, warm_up_rows: int) -> dict[str, float]:
    """Of one pass without its first steps; the worker process, which has ended by now, counts in proportion."""
    start, end = steps[WARM_UP - 1], steps[-1]
    counted = rows - warm_up_rows
    processor = end.processor - start.processor + (Clock().workers - start.workers) * counted / rows
    return {
        "rows": counted,
        "seconds": round(end.wall - start.wall, 2),
        "rows_per_s": round(counted / (end.wall - start.wall), 1),
        "processor_seconds": round(processor, 2),
        "rows_per_processor_s": round(counted / processor, 1),
    }


def time_fuxictr(work: Path, folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """One pass of DIN's own trainer."""
    torch.set_num_threads(given.threads)
    schema = Schema.load(work / "sample-schema.json")
    features = feature_map(schema, work)
    seed_everything(0)
    model = Din(features, work / "fuxictr", LEARNING_RATES[0])
    data = loader(features, work / "sample" / "train-000.npz", given.batch_rows, shuffle=True)
    model.fit(data, epochs=1)
    return figures(model.steps, data.num_samples, WARM_UP * given.batch_rows)


def time_gem(work: Path, folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """One pass of the recipe over the same rows."""
    recipe = load(given.recipe, given.set)
    value = recipe.dump()
    schema = Schema.load(SCHEMA) if recipe.data.schema_ is None else Schema.parse(value["data"]["schema"])
    lengths = value["data"]["reader"].get("max_length", {})
    cut = {event: schema.events[event].model_copy(update={"max_length": length}) for event, length in lengths.items()}
    schema = schema.model_copy(update={"events": schema.events | cut})
    value["output"] = str(work / "gem")
    value["data"]["schema"] = schema.model_dump(mode="json", exclude_defaults=True)
    value["data"]["reader"] = {"name": "parquet", **log_options(folder, work / "sample.parquet", tuple(schema.events))}
    value["trainer"] |= {"epochs": 1, "max_steps": None, "threads": given.threads, "early_stop": None}
    value["trainer"] |= {"evaluate_every": None, "checkpoint_every": None}
    value["trackers"] = []
    trainer = Trainer(parse(value), default_registry())
    steps = Steps()
    trainer.callbacks.append(steps)
    trainer.run("never")
    first = islice(trainer.parts.reader.iterate("train", batch_rows=recipe.data.batch_rows), WARM_UP)
    rows = trainer.parts.schema.require_fitted().rows
    return figures(steps.steps, rows, sum(batch.rows for batch in first))


SIDES = {"fuxictr": time_fuxictr, "gem": time_gem}


def speed(given: argparse.Namespace, work: Path, folder: Path) -> dict[str, Any]:
    """Both sides in turn, each run in a fresh process; medians."""
    rows = work / "sample.parquet"
    count = sample(folder, rows, given.rows)
    reader = ParquetReader(ParquetReader.Config(**log_options(folder, rows)), in_store(Schema.load(SCHEMA)))
    export(reader, "train", work / "sample", count)
    reader.schema.save(work / "sample-schema.json")
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for i in range(given.repeats):
        for side in sorted(SIDES, reverse=bool(i % 2)):
            command = [sys.executable, __file__, *sys.argv[1:], "--log", str(folder), "--side", side]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"run {i} {side}: {runs[side][-1]}", flush=True)
    out: dict[str, Any] = {"sample_rows": count, "threads": given.threads, "fuxictr_batch_rows": given.batch_rows}
    out |= {"gem_recipe": given.recipe.name, "gem_overrides": given.set, "runs": runs}
    for measure in ("rows_per_s", "rows_per_processor_s"):
        medians = {side: statistics.median(run[measure] for run in runs[side]) for side in SIDES}
        out[measure] = medians | {"ratio": round(medians["gem"] / medians["fuxictr"], 2)}
    return out


# ---- quality ---------------------------------------------------------------------------------------------------------


def train(work: Path, features: Any, rate: float, epochs: int, given: argparse.Namespace) -> Any:
    """The model after so many epochs; goes on from the saved state, block by block."""
    blocks = sorted((work / "rows").glob("train-*.npz"))
    state = work / f"state-{rate:g}.pt"
    seed_everything(0)
    model = Din(features, work / f"din-{rate:g}", rate)
    done = 0
    if state.exists():
        kept = torch.load(state)
        model.load_state_dict(kept["model"])
        model.optimizer.load_state_dict(kept["optimizer"])
        done = kept["done"]
    while done < epochs * len(blocks):
        seed_everything(done)
        data = loader(features, blocks[done % len(blocks)], given.batch_rows, shuffle=True)
        model._eval_steps = len(data)  # blocks differ in length, and `fit` keeps the first one's
        started = time.perf_counter()
        model.fit(data, epochs=1)
        done += 1
        new = state.with_suffix(".new")
        torch.save({"model": model.state_dict(), "optimizer": model.optimizer.state_dict(), "done": done}, new)
        new.replace(state)
        print(f"lr {rate:g}: block {done} of {EPOCHS * len(blocks)}, {time.perf_counter() - started:.0f} s", flush=True)
    return model


def evaluate(model: Any, features: Any, rows: Path, split: str, batch_rows: int) -> dict[str, float]:
    """AUC, and log-loss over the entropy of the rate of positives (NE)."""
    files = sorted(rows.glob(f"{split}-*.npz"))
    predicted = np.concatenate([model.predict(loader(features, file, batch_rows, shuffle=False)) for file in files])
    labels = np.concatenate([np.load(file)[TASK] for file in files]).astype(np.float64)
    entropy = log_loss(labels, np.full(len(labels), labels.mean()))
    ne = log_loss(labels, predicted) / entropy
    return {"auc": round(float(roc_auc_score(labels, predicted)), 5), "ne": round(ne, 5), "rows": len(labels)}


def quality(given: argparse.Namespace, work: Path, folder: Path) -> dict[str, Any]:
    """Every learning rate and epoch on validation and test; the one that validation chooses."""
    torch.set_num_threads(given.threads)
    path = work / "rows-schema.json"
    if not path.exists():
        reader = ParquetReader(ParquetReader.Config(**log_options(folder)), in_store(Schema.load(SCHEMA)))
        for split in SPLITS:
            export(reader, split, work / "rows")
        reader.schema.save(path)
        del reader  # gigabytes
    schema = Schema.load(path)
    features = feature_map(schema, work)
    results: list[dict[str, Any]] = []
    for epochs in range(1, EPOCHS + 1):
        for rate in LEARNING_RATES:
            kept = work / f"result-{rate:g}-{epochs}.json"
            if not kept.exists():
                model = train(work, features, rate, epochs, given)
                found: dict[str, Any] = {"lr": rate, "epochs": epochs}
                for split in ("validation", "test"):
                    found[split] = evaluate(model, features, work / "rows", split, given.batch_rows)
                kept.write_text(json.dumps(found))
            results.append(json.loads(kept.read_text()))
            print(results[-1], flush=True)
    return {
        "objective": TASK,
        "train_rows": schema.require_fitted().rows,
        "batch_rows": given.batch_rows,
        "seeds": 1,
        "results": results,
        "chosen_on_validation": min(results, key=lambda found: found["validation"]["ne"]),
    }


def write(path: Path, mode: str, result: Mapping[str, Any]) -> None:
    """Replace one mode's part of the results file."""
    whole = json.loads(path.read_text()) if path.exists() else {}
    where = environment() | {"fuxictr": FUXICTR}
    whole[mode] = {"environment": where, **result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")


def main() -> None:
    """Run a mode, or one timed side in a process of its own."""
    root = Path(__file__).resolve().parent
    recipe = root.parent / "recipes/completejourney-full.yaml"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quality", action="store_true", help="train DIN on all rows and evaluate it")
    parser.add_argument("--recipe", type=Path, default=recipe, help="GEM's recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change GEM's recipe")
    parser.add_argument("--rows", type=int, default=60_000, help="training rows of the speed runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    parser.add_argument("--batch-rows", type=int, default=2048, help="DIN's batch")
    parser.add_argument("--log", type=Path, help="the prepared log (default: prepared into the reader's cache)")
    parser.add_argument("--work", type=Path, default=root.parent / "runs/fuxictr_din", help="for files and state")
    parser.add_argument("--out", type=Path, default=root / "results" / "fuxictr_din.json")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.disable(logging.INFO)
    folder = given.log or CompleteJourneyReader(CompleteJourneyReader.Config()).folder
    given.work.mkdir(parents=True, exist_ok=True)
    if given.side:
        print(json.dumps(SIDES[given.side](given.work, folder, given)))
        return
    mode = quality if given.quality else speed
    result = mode(given, given.work, folder)
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=1))
    write(given.out, "quality" if given.quality else f"speed, threads: {given.threads}", result)


if __name__ == "__main__":
    main()
