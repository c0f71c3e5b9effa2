# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the gradient of a step with that of one forward over the batch: ``python examples/three_lines.py``."""

import torch
from composer import Callback, Logger, State, Trainer
from composer.models import HuggingFaceModel
from transformers import LlamaConfig, LlamaForCausalLM

from composer_tokacc import TokenAccumulation, token_data_spec

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
llama = LlamaForCausalLM(config)

# Eight rows of 4 to 60 tokens, padded to 60. The first quarter of each row is the prompt.
lengths = torch.tensor([[4], [7], [9], [12], [16], [25], [40], [60]])
columns = torch.arange(60)
is_real = columns < lengths
is_prompt = columns < lengths // 4
ids = torch.randint(3, 64, (8, 60))
batch = {
    'input_ids': ids,
    'attention_mask': is_real.long(),
    'labels': ids.masked_fill(~is_real | is_prompt, -100),
}


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """Returns the gradients of all parameters as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


llama(**batch).loss.backward()
expected = gradient_of(llama)


class ShowError(Callback):
    """Prints the relative error of the step's gradient before the optimizer moves."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Runs after the last microbatch."""
        difference = gradient_of(state.model) - expected
        error = difference.norm() / expected.norm()
        print(f'gradient error {error:.1e}')


runs = {
    'stock Composer': ([batch], None),
    'with TokenAccumulation and token_data_spec': (token_data_spec([batch]), [TokenAccumulation()]),
}
# The learning rate is 0, so both runs train the same model. Composer sets its gradients to 0 before a step.
for name, (data, algorithms) in runs.items():
    print(name, end=': ')
    trainer = Trainer(
        model=HuggingFaceModel(llama, shift_labels=True),
        train_dataloader=data,
        algorithms=algorithms,
        device_train_microbatch_size=2,
        max_duration='1ba',
        callbacks=[ShowError()],
        optimizers=torch.optim.SGD(llama.parameters(), lr=0.0),
        device='cpu',
        progress_bar=False,
    )
    trainer.fit()
