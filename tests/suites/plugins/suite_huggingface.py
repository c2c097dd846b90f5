"""pytest plugin: ``CraftTrainer`` in the place of ``transformers.Trainer``, for everything that is imported after it."""

from __future__ import annotations

import sys

from transformers import trainer, trainer_seq2seq

from craft.adapters.huggingface import CraftMixin, CraftTrainer


class CraftSeq2SeqTrainer(CraftMixin, trainer_seq2seq.Seq2SeqTrainer):  # type: ignore[misc]
    """``Seq2SeqTrainer`` over the steps of a job."""


trainer.Trainer = CraftTrainer
trainer_seq2seq.Seq2SeqTrainer = CraftSeq2SeqTrainer
# Looked up only now: the package makes its own module object anew while its parts are imported.
transformers = sys.modules["transformers"]
transformers.Trainer = CraftTrainer  # type: ignore[attr-defined]
transformers.Seq2SeqTrainer = CraftSeq2SeqTrainer  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """The tests are imported: they must have got CRAFT's class, or a run would say nothing."""
    from transformers import Trainer

    if Trainer is not CraftTrainer:
        raise RuntimeError(f"transformers.Trainer is {Trainer}, not CraftTrainer: this plugin has to be changed")
