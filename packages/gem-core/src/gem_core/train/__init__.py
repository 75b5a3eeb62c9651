"""Training: trainer, embedding tables, optimiser, losses, metrics, checkpoints, evaluation, prediction."""

from gem_core.train.checkpoint import Checkpoint
from gem_core.train.embedding import TorchEmbedding
from gem_core.train.metrics import RankingMetrics
from gem_core.train.trainer import Result, Trainer, train

__all__ = ["Checkpoint", "RankingMetrics", "Result", "TorchEmbedding", "Trainer", "train"]
