"""gem-core's own components, registered by the same path as a stranger's."""

from __future__ import annotations

from gem_core.plugins.hooks import CONTRACT_VERSION, Register, hookimpl


@hookimpl
def gem_contract() -> int:
    return CONTRACT_VERSION


@hookimpl
def gem_register_reader(register: Register) -> None:
    register("csv", "gem_core.data.readers:CsvReader")
    register("parquet", "gem_core.data.readers:ParquetReader")
    register("memory", "gem_core.data.readers:MemoryReader")
    register("generated", "gem_core.data.generated:GeneratedReader")
    register("completejourney", "gem_core.data.completejourney:CompleteJourneyReader")


@hookimpl
def gem_register_model(register: Register) -> None:
    register("kunlun", "gem_core.model.kunlun:Kunlun")
    register("din", "gem_core.model.din:DIN")
    register("dcnv2", "gem_core.model.dcnv2:DCNv2")
    register("interformer", "gem_core.model.interformer:InterFormer")
    register("wukong", "gem_core.model.wukong_model:Wukong")
    register("hstu", "gem_core.model.hstu:HSTU")


@hookimpl
def gem_register_op(register: Register) -> None:
    # gem_core.ops, which may import nothing of ours, offers these itself; here they are listed, and their names taken.
    classes = {
        "jagged_attention": "Jagged",
        "block_attention": "Block",
        "seed_attention": "Seed",
        "gdpa": "Gdpa",
        "gdpa_ffn": "Ffn",
        "hstu_attention": "Hstu",
        "rote": "Rote",
    }
    for op, name in classes.items():
        register(f"{op}:reference", f"gem_core.ops.reference:{name}Reference")
        register(f"{op}:ragged", f"gem_core.ops.ragged:Ragged{name}")


@hookimpl
def gem_register_precision(register: Register) -> None:
    register("fp32", "gem_core.train.precision:Float32")
    register("bf16", "gem_core.train.precision:BFloat16")


@hookimpl
def gem_register_embedding(register: Register) -> None:
    register("torch", "gem_core.train.embedding:TorchEmbedding")


@hookimpl
def gem_register_strategy(register: Register) -> None:
    register("single", "gem_core.train.strategy:SingleProcess")
    register("ddp", "gem_core.train.ddp:DataParallel")


@hookimpl
def gem_register_batcher(register: Register) -> None:
    register("in-order", "gem_core.data.loader:InOrder")


@hookimpl
def gem_register_loss(register: Register) -> None:
    register("bce", "gem_core.train.loss:BinaryCrossEntropy")
    register("focal", "gem_core.train.loss:FocalLoss")
    register("pairwise", "gem_core.train.loss:PairwiseLoss")


@hookimpl
def gem_register_metric(register: Register) -> None:
    register("ranking", "gem_core.train.metrics:RankingMetrics")


@hookimpl
def gem_register_tracker(register: Register) -> None:
    register("console", "gem_core.train.trackers:Console")
    register("jsonl", "gem_core.train.trackers:JsonLines")
    register("tensorboard", "gem_core.train.trackers:TensorBoard")


@hookimpl
def gem_register_callback(register: Register) -> None:
    register("profiler", "gem_core.train.callbacks:Profiler")
    register("publish", "gem_core.train.publish:Publish")


@hookimpl
def gem_register_command(register: Register) -> None:
    register("train", "gem_core.cli.train:train", "Train a model from a recipe.")
    register("sweep", "gem_core.cli.sweep:sweep", "Search a recipe's options; chosen on the validation split.")
    register("eval", "gem_core.cli.evaluate:evaluate", "Evaluate a run or a checkpoint on a split.")
    register("predict", "gem_core.cli.predict:predict", "Score the rows of a file with a run.")
    register("export", "gem_core.cli.export:export", "Write a run's model as a program for other processes.")
    register("plugins", "gem_core.cli.plugins:plugins", "List what is installed: kinds, names, owners, broken plugins.")
    register("doctor", "gem_core.cli.doctor:doctor", "Check this machine and the installed versions.")
    register(
        "data generate", "gem_core.cli.generate:generate", "Write a generated ads log whose best possible NE is known."
    )
    register("data check", "gem_core.cli.data:check", "Profile a log and look for leaks of the label and the future.")
    register(
        "data prepare",
        "gem_core.cli.prepare:prepare",
        "Make impressions, labels, counts and histories from a raw event log.",
    )
    register("data profile", "gem_core.cli.data:profile", "Count what is in a log, and what is wrong with it.")
