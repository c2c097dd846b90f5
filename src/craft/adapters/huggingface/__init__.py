"""Hugging Face's Trainer (transformers 5): ``CraftTrainer`` replaces it, started by ``craft run``.

Import it before ``TrainingArguments`` are made: from then on accelerate, which looks for other processes in the environment,
takes a worker for a single process. See docs/tutorials/huggingface.md.
"""

from __future__ import annotations

from craft.adapters.requirements import check

check("transformers", "accelerate")

from craft.adapters.huggingface.trainer import CraftMixin, CraftTrainer  # noqa: E402

__all__ = ["CraftMixin", "CraftTrainer"]
