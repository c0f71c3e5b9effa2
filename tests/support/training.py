# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""One optimizer step of the real Trainer, and the plain autograd reference that it is held to."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, DataSpec, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.utils.data import DataLoader, IterableDataset

from composer_tokacc import TokenAccumulation, token_data_spec

Gradients = dict[str, torch.Tensor]


class GivenBatches(IterableDataset):
    """Yields ready batches: each rank is handed its own, so that a test decides who computes what."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(copy.deepcopy(list(self.batches)))

    def __len__(self) -> int:
        return len(self.batches)


def loader(*batches: Any) -> DataLoader:
    """A DataLoader of ready batches."""
    return DataLoader(GivenBatches(batches), batch_size=None)


class GradientRecorder(Callback):
    """Keeps the gradients, the loss seen at BATCH_END, and what the step logged."""

    def __init__(self) -> None:
        self.steps: list[Gradients] = []
        self.losses: list[Any] = []
        self.memory, self.trainer = InMemoryLogger(), None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_TRAIN_BATCH:
            parameters = unwrapped(state.model).named_parameters()
            self.steps.append({name: full(p.grad).cpu().clone() for name, p in parameters if p.grad is not None})
        elif event == Event.BATCH_END:
            self.losses.append(state.loss)

    @property
    def gradients(self) -> Gradients:
        """Those of the last step."""
        return self.steps[-1]

    def logged(self, name: str) -> list[float]:
        """Values of a metric of the run, in order."""
        return logged(self.memory, name)


class On(Callback):
    """Calls a function with the state at an event, and keeps what it returns."""

    def __init__(self, event: Event, function: Callable[[State], Any]) -> None:
        self.event, self.function = event, function
        self.values: list[Any] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == self.event:
            self.values.append(self.function(state))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor out of a sharded one."""
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """A hash of the parameters, and their norm; of all ranks where they are sharded."""
    values = torch.cat([full(p).detach().flatten() for p in unwrapped(model).parameters()])
    return {'parameters': hashlib.sha256(values.numpy().tobytes()).hexdigest(), 'norm': float(values.double().norm())}


def saving(folder: str | None) -> dict[str, Any]:
    """Options of the Trainer for a checkpoint a step, ``ba{batch}.pt``, also between two epochs."""
    names = {'save_folder': folder, 'save_filename': 'ba{batch}.pt', 'save_num_checkpoints_to_keep': -1}
    return {**names, 'save_interval': '1ba'} if folder else {}


def train(
    model: Any,
    data: Any,
    *,
    algorithms: Iterable[Any] = (),
    callbacks: Iterable[Any] = (),
    microbatch_size: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    max_duration: str = '1ba',
    device: Any = 'cpu',
    progress_bar: bool = False,
    loggers: Iterable[Any] = (),
    **kwargs: Any,
) -> tuple[GradientRecorder, InMemoryLogger, Trainer]:
    """Runs the Trainer, at learning rate 0 unless an optimizer is given."""
    recorder, memory = GradientRecorder(), InMemoryLogger()
    composer_model = model if hasattr(model, 'eval_forward') else hugging_face(model)
    optimizer = optimizer or torch.optim.SGD(composer_model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer = Trainer(
            model=composer_model,
            train_dataloader=data,
            optimizers=optimizer,
            max_duration=max_duration,
            device=device,
            algorithms=list(algorithms),
            callbacks=[*callbacks, recorder],
            loggers=[*loggers, memory],
            device_train_microbatch_size=microbatch_size,
            progress_bar=progress_bar,
            **kwargs,
        )
        trainer.fit()
    return recorder, memory, trainer


OWN_OPTIONS = inspect.signature(TokenAccumulation).parameters.keys()
SPLIT_OPTIONS = {*inspect.signature(token_data_spec).parameters, 'batch_transforms', 'microbatch_transforms'}
SPLIT_OPTIONS -= {'model', *OWN_OPTIONS}


def fit(model: Any, *data: Any, microbatch_size: int = 2, **options: Any) -> GradientRecorder:
    """Trains with TokenAccumulation; a step on each batch, unless told otherwise.

    Args:
        model: A Composer model, or one of Hugging Face.
        data: Batches, for ``token_data_spec`` to split; or one loader or DataSpec.
        microbatch_size: Of the Trainer.
        options: Those of TokenAccumulation; with batches those of ``token_data_spec``; others of :func:`train`.

    Returns:
        What was recorded: gradients, what was logged, and the ``trainer``.
    """
    own = {name: options.pop(name) for name in OWN_OPTIONS & options.keys()}
    assert not (own and 'algorithms' in options)
    options.setdefault('algorithms', [TokenAccumulation(**own)])
    if isinstance(data[0], (DataLoader, DataSpec)):
        [given] = data
    else:
        split = {name: options.pop(name) for name in SPLIT_OPTIONS & options.keys()}
        given = token_data_spec(loader(*data), **split)
        options.setdefault('max_duration', f'{len(data)}ba')
    recorder, recorder.memory, recorder.trainer = train(model, given, microbatch_size=microbatch_size, **options)
    return recorder


TOLERANCE = 1e-6


def assert_exact(model: Any, *data: Any, batch: Any = None, **options: Any) -> GradientRecorder:
    """Trains as :func:`fit`, and holds gradient and logged loss of each step to one forward over its batch.

    Args:
        model: Of Hugging Face.
        data: See :func:`fit`.
        batch: What one forward is over; None: each batch of the data.
        options: See :func:`fit`.
    """
    batches = data if batch is None else [batch]
    expected = [reference_gradients(model, one) for one in batches]
    recorder = fit(model, *data, **options)
    for (gradients, loss), found, seen in zip(expected, recorder.steps, recorder.logged(TOTAL), strict=True):
        assert relative_error(found, gradients) < TOLERANCE
        assert abs(seen - loss) < TOLERANCE * abs(loss)
    return recorder


TOTAL = 'loss/train/total'


def hugging_face(model: torch.nn.Module, **kwargs: Any) -> HuggingFaceModel:
    return HuggingFaceModel(model, shift_labels=True, use_logits=True, **kwargs)


def in_double(model: Any) -> Any:
    """A copy in float64, with experts one by one: torch's grouped product of newer hosts takes no doubles on a CPU."""
    model = copy.deepcopy(model).double()
    host = next((one for one in model.modules() if hasattr(one, '_can_set_experts_implementation')), None)
    if host is not None and host._can_set_experts_implementation():
        host.set_experts_implementation('eager')
    return model


def reference_gradients(
    model: torch.nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Gradients, float]:
    """Gradient and loss of one plain forward over the whole global batch, by the model's own mean.

    In float64, so that only the round-off of what is tested counts: a float32 reference is 7e-7 off by itself. Not for
    eager attention with left padding: transformers casts float64's lowest mask value to float32 there, which gives NaN.
    """
    model = in_double(model).to(dtype)
    model.zero_grad(set_to_none=True)
    inputs = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    if 'use_cache' in inspect.signature(model.forward).parameters:  # encoders of Transformers 4 have none
        inputs['use_cache'] = False
    loss = model(**inputs).loss
    loss.backward()
    gradients = {f'model.{name}': p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients, loss.item()


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference over norm of the reference, over all parameters; an absent gradient is zero."""
    names = found.keys() | expected.keys()
    zero = torch.zeros(())
    difference = sum((found.get(n, zero) - expected.get(n, zero)).double().square().sum() for n in names)
    norm = sum(value.double().square().sum() for value in expected.values())
    return float((difference / norm).sqrt())


def logged(memory: InMemoryLogger, name: str) -> list[float]:
    """Values of a metric, in order."""
    return [float(value) for _, value in memory.data[name]]


def each_run(run: Callable[..., Any]) -> Callable[[str], list[Any]]:
    """Makes a ``main`` for :func:`.launch_json`: it takes a JSON list of the arguments of several runs."""
    return lambda runs: [run(**arguments) for arguments in json.loads(runs)]


def rank_share(items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """This rank's contiguous share, ``sizes`` giving how many each rank gets."""
    start = sum(sizes[: dist.get_global_rank()])
    return list(items[start : start + sizes[dist.get_global_rank()]])
