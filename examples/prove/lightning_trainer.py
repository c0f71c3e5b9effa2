# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Lightning with ``accumulate_grad_batches``: ``python examples/prove/lightning_trainer.py``."""

import lightning
import torch
from subject import prove


class Module(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def step(model, microbatches):
    """One optimizer step."""
    module = Module()
    module.model = model
    loader = torch.utils.data.DataLoader(microbatches, batch_size=None)
    trainer = lightning.Trainer(
        accumulate_grad_batches=len(microbatches),
        max_epochs=1,
        accelerator='cpu',
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


prove('Lightning, `accumulate_grad_batches`', 'lightning', step)
