"""Training: trainer, embedding tables, optimiser, losses, metrics, checkpoints, evaluation, prediction."""

from gem_core.train.build import Parts, build, restore
from gem_core.train.checkpoint import Checkpoint
from gem_core.train.embedding import TorchEmbedding
from gem_core.train.evaluate import evaluate
from gem_core.train.metrics import RankingMetrics
from gem_core.train.predict import predict
from gem_core.train.state import Result
from gem_core.train.trainer import Trainer, train

__all__ = [
    "Checkpoint",
    "Parts",
    "RankingMetrics",
    "Result",
    "TorchEmbedding",
    "Trainer",
    "build",
    "evaluate",
    "predict",
    "restore",
    "train",
]
