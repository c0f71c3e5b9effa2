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
    module, off = Module(), ('checkpointing', 'progress_bar', 'model_summary')
    module.model = model
    settings = {'max_epochs': 1, 'accelerator': 'cpu', 'logger': False, **{f'enable_{name}': False for name in off}}
    loader = torch.utils.data.DataLoader(microbatches, batch_size=None)
    lightning.Trainer(accumulate_grad_batches=len(microbatches), **settings).fit(module, loader)


prove('Lightning, `accumulate_grad_batches`', 'lightning', step)
