# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs steps of the real Trainer, and the plain autograd reference that they are compared with."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from composer import Trainer
from composer.core import Callback, DataSpec, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.utils.data import DataLoader, IterableDataset

from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.checks.first_batch import FirstBatchCheck, LossFacts

Gradients = dict[str, torch.Tensor]
COMPOSERS_FLAG = {'accumulate_train_batch_on_tokens': True}
"""Composer's own option of the Trainer for weights by tokens."""


class GivenBatches(IterableDataset):
    """Yields batches that a test has made, on each rank its own. So the test decides which rank computes which rows."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(copy.deepcopy(list(self.batches)))

    def __len__(self) -> int:
        return len(self.batches)


def loader(*batches: Any) -> DataLoader:
    """Returns a DataLoader of these batches."""
    return DataLoader(GivenBatches(batches), batch_size=None)


class GradientRecorder(Callback):
    """Records the gradients of each step, the loss at BATCH_END, and the logged metrics.

    :func:`train` sets ``trainer``.
    """

    def __init__(self) -> None:
        self.steps: list[Gradients] = []
        self.losses: list[Any] = []
        self.memory = InMemoryLogger()
        self.trainer: Any = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_TRAIN_BATCH:
            gradients = {}
            for name, parameter in unwrapped(state.model).named_parameters():
                if parameter.grad is not None:
                    gradient = full(parameter.grad)
                    gradients[name] = gradient.cpu().clone()
            self.steps.append(gradients)
        elif event == Event.BATCH_END:
            self.losses.append(state.loss)

    @property
    def gradients(self) -> Gradients:
        """The gradients of the last step."""
        return self.steps[-1]

    def logged(self, name: str) -> list[float]:
        """Returns the values of a metric of the run, in order."""
        return logged(self.memory, name)


class On(Callback):
    """Calls a function with the state at an event, and records its results."""

    def __init__(self, event: Event, function: Callable[[State], Any]) -> None:
        self.event = event
        self.function = function
        self.values: list[Any] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == self.event:
            self.values.append(self.function(state))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model without the wrapper of DDP."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model.module
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor, also of a sharded one."""
    if hasattr(tensor, 'full_tensor'):
        return tensor.full_tensor()
    return tensor


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Returns a hash of the parameters, and their norm. Sharded parameters are gathered from all ranks."""
    parameters = [full(parameter).detach().flatten() for parameter in unwrapped(model).parameters()]
    values = torch.cat(parameters)
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return {'parameters': digest, 'norm': float(values.double().norm())}


@contextmanager
def weights_unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Fails if a trained weight has changed at the end. For runs that are refused before the optimizer moves."""
    before = copy.deepcopy(dict(model.named_parameters()))
    yield
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or torch.equal(parameter, before[name]), name


def saving(folder: str | None) -> dict[str, Any]:
    """Returns options of the Trainer that save a checkpoint after each step, ``ba{batch}.pt``. None: no checkpoints."""
    if folder is None:
        return {}
    return {
        'save_folder': folder,
        'save_filename': 'ba{batch}.pt',
        'save_num_checkpoints_to_keep': -1,
        'save_interval': '1ba',
    }


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
    recorder: GradientRecorder | None = None,
    **kwargs: Any,
) -> tuple[GradientRecorder, InMemoryLogger, Trainer]:
    """Runs the Trainer.

    Without an optimizer the learning rate is 0. Then the weights do not move, and each step can be compared with the
    same model. A test passes its own ``recorder`` if the run may raise after some steps.
    """
    recorder = recorder or GradientRecorder()
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
            loggers=[*loggers, recorder.memory],
            device_train_microbatch_size=microbatch_size,
            progress_bar=progress_bar,
            **kwargs,
        )
        recorder.trainer = trainer
        trainer.fit()
    return recorder, recorder.memory, trainer


# `token_data_spec` passes the transforms on to DataSpec. `fit` has the model as its first argument. Options of both,
# such as `loss_tokens`, go to the algorithm.
ALGORITHM_OPTIONS = inspect.signature(TokenAccumulation).parameters.keys()
SPLIT_OPTIONS = {*inspect.signature(token_data_spec).parameters, 'batch_transforms', 'microbatch_transforms'}
SPLIT_OPTIONS -= {'model', *ALGORITHM_OPTIONS}


def fit(model: Any, *data: Any, microbatch_size: int = 2, **options: Any) -> GradientRecorder:
    """Trains with TokenAccumulation.

    Batches: one step on each. A loader or DataSpec: one step, unless ``max_duration`` says otherwise.

    Args:
        model: A model of Composer or of Hugging Face.
        data: Batches, which ``token_data_spec`` splits. Or one loader or DataSpec.
        microbatch_size: Option of the Trainer.
        options: Options of TokenAccumulation and of :func:`train`. With batches also options of ``token_data_spec``.

    Returns:
        The recorder, with gradients, logged metrics and the ``trainer``.
    """
    algorithm_options = {name: options.pop(name) for name in ALGORITHM_OPTIONS & options.keys()}
    assert not (algorithm_options and 'algorithms' in options)
    options.setdefault('algorithms', [TokenAccumulation(**algorithm_options)])
    if isinstance(data[0], (DataLoader, DataSpec)):
        (train_data,) = data
    else:
        split_options = {name: options.pop(name) for name in SPLIT_OPTIONS & options.keys()}
        train_data = token_data_spec(loader(*data), **split_options)
        options.setdefault('max_duration', f'{len(data)}ba')
    recorder, _, _ = train(model, train_data, microbatch_size=microbatch_size, **options)
    return recorder


@contextmanager
def unchecked_rows() -> Iterator[None]:
    """Leaves out the first-batch check, which takes a third of a short run.

    It is for runs that test something else. They must give a loss rule, with ``check_loss=False``.
    """

    def prove(check: FirstBatchCheck, batch: Any, microbatch_size: float) -> LossFacts:
        assert not check.check_loss
        assert check.cutter is not None
        assert check.named_rule is not None
        check.cutter.adopt(check.cutter.rules, check.layout, has_loss_in_dummies=False)
        return LossFacts(rule=check.named_rule)

    with mock.patch.object(FirstBatchCheck, 'prove', prove):
        yield


TOLERANCE = 1e-6


def assert_exact(
    model: Any, *data: Any, batch: Any = None, reference_dtype: torch.dtype = torch.float64, **options: Any
) -> GradientRecorder:
    """Trains as :func:`fit`. Compares gradient and logged loss of each step with one forward over its batch.

    Args:
        model: A model of Hugging Face.
        data: See :func:`fit`.
        batch: The batch of the one forward, or a list with the batch of each step. Needed if ``data`` is a loader or
            DataSpec. None: each batch of the data.
        reference_dtype: See :func:`reference_gradients`.
        options: See :func:`fit`.
    """
    if batch is None:
        batches = data
    elif isinstance(batch, list):
        batches = batch
    else:
        batches = [batch]
    references = [reference_gradients(model, reference_batch, reference_dtype) for reference_batch in batches]

    recorder = fit(model, *data, **options)

    losses = recorder.logged(TOTAL)
    for reference, gradients, loss in zip(references, recorder.steps, losses, strict=True):
        expected_gradients, expected_loss = reference
        assert relative_error(gradients, expected_gradients) < TOLERANCE
        assert abs(loss - expected_loss) < TOLERANCE * abs(expected_loss)
    return recorder


TOTAL = 'loss/train/total'


def hugging_face(model: torch.nn.Module, **kwargs: Any) -> HuggingFaceModel:
    return HuggingFaceModel(model, shift_labels=True, use_logits=True, **kwargs)


def in_double(model: Any) -> Any:
    """Returns a copy in float64. It runs its experts one by one, because grouped products need float32 on a CPU."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if hasattr(module, '_can_set_experts_implementation'):
            if module._can_set_experts_implementation():
                module.set_experts_implementation('eager')
            break  # this is the outermost model of Hugging Face, and the call also sets its parts
    return model


def reference_gradients(
    model: torch.nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Gradients, float]:
    """Returns gradient and loss of one plain forward over the whole global batch, by the model's own mean.

    By default it is in float64, because a reference in float32 would have an error of 7e-7 itself. In float64, eager
    attention with padding on the left gives NaN, because transformers casts the lowest float64 to float32 there.
    """
    model = in_double(model).to(dtype)
    model.zero_grad(set_to_none=True)
    inputs: dict[str, Any] = tensors_in(batch, dtype)
    if 'use_cache' in inspect.signature(model.forward).parameters:  # encoders of Transformers 4 have none
        inputs['use_cache'] = False
    loss = model(**inputs).loss
    loss.backward()
    return composer_gradients(model), loss.item()


def tensors_in(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the tensors of a batch. Tensors of floats get the type."""
    tensors = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                value = value.to(dtype)
            tensors[key] = value
    return tensors


def take_gradients(model: torch.nn.Module, prefix: str = '') -> Gradients:
    """Returns the gradients by name, and leaves none in the model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[prefix + name] = parameter.grad
    model.zero_grad(set_to_none=True)
    return gradients


def composer_gradients(model: torch.nn.Module) -> Gradients:
    """Returns the gradients by the names that they have in a model of Composer, and leaves none in the model."""
    return take_gradients(model, 'model.')


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> Gradients:
    """Returns the gradients of a loss, by the names of :func:`composer_gradients`, and leaves none in the model."""
    loss.backward()
    return composer_gradients(model)


def num_hooks(model: torch.nn.Module) -> int:
    """Returns the number of hooks around the forwards of a model's modules."""
    total = 0
    for module in model.modules():
        total += len(module._forward_hooks)
        total += len(module._forward_pre_hooks)
    return total


def relative_error(gradients: Gradients, expected: Gradients) -> float:
    """Returns the norm of the difference over the norm of the reference. A missing gradient counts as zero."""
    zero = torch.zeros(())
    squared_error = zero.double()
    for name in gradients.keys() | expected.keys():
        difference = gradients.get(name, zero) - expected.get(name, zero)
        squared_error = squared_error + difference.double().square().sum()
    squared_norm = zero.double()
    for gradient in expected.values():
        squared_norm = squared_norm + gradient.double().square().sum()
    relative_square = squared_error / squared_norm
    return float(relative_square.sqrt())


def largest(errors: Iterable[float]) -> float:
    """Returns the largest error, infinite if one of them is NaN. Python's `max` may overlook a NaN."""
    without_nan = [math.inf if math.isnan(error) else error for error in errors]
    return max(without_nan)


def logged(memory: InMemoryLogger, name: str) -> list[float]:
    """Returns the values of a metric, in order."""
    return [float(value) for _, value in memory.data[name]]


def each_run(run: Callable[..., Any]) -> Callable[[str], list[Any]]:
    """Returns a ``main`` for :func:`.launch_json`, which takes the arguments of several runs as a JSON list."""

    def main(runs: str) -> list[Any]:
        return [run(**arguments) for arguments in json.loads(runs)]

    return main


def rank_share(items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Returns the items of this rank. ``sizes`` says how many each rank gets, one rank after the other."""
    rank = dist.get_global_rank()
    start = sum(sizes[:rank])
    end = start + sizes[rank]
    return list(items[start:end])
