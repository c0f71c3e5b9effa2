# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Values of a config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from composer_tokacc.programs import ConfigError
from tests.support.programs import LLAVA, check_run
from tests.trials.outcomes import WORKS, refusal


@dataclass(frozen=True)
class Override:
    """An override of ``yamls/llava_json.yaml``, read as before data and model are loaded."""

    text: str
    expected: str

    def run(self, folder: Path) -> str:
        overrides = [f'dataset.path={folder}/data.json', self.text]
        return refusal(lambda: check_run(LLAVA, overrides, num_ranks=1), ConfigError)


OVERRIDES = {
    # name: (override, expected)
    'a number in quotes': ('seed="17"', '`seed` must be a valid integer'),
    'a learning rate in percent': ('optimizer.lr=5%', '`optimizer.lr`'),
    'a dataset part with 100,000 epochs': ('dataset.parts={a: {epochs: 100000}}', '`dataset.parts.a.epochs`'),
    'a callback that loads a pickle': ('callbacks={load_checkpoint: {load_path: x}}', '`callbacks` has no class'),
    'a callback that loads a pickle, by its dotted name': (
        'callbacks={composer.callbacks.LoadCheckpoint: {load_path: x}}',
        '`callbacks` has no class',
    ),
    'an averaging that ends before it starts': (
        'algorithms={swa: {swa_start: 0.9dur, swa_end: 0.1dur}}',
        '`algorithms.swa`',
    ),
    'clipping threshold of 0': ('algorithms.gradient_clipping.clipping_threshold=0', 'clipping_threshold'),
    'clipping threshold above 0': ('algorithms.gradient_clipping.clipping_threshold=0.5', WORKS),
    'width multiple of a billion': ('microbatching.width_multiple=1000000000', 'width_multiple'),
    'width multiple of 8': ('microbatching.width_multiple=8', WORKS),
    'an unknown attention implementation': ('model.config.attn_implementation=flahs', 'attn_implementation'),
    'warm-up longer than the run': ('scheduler.t_warmup=100ep', WORKS),
    'a number of five thousand digits': (f'seed={"9" * 5000}', '`seed`'),
    'duration in seconds': ('trainer.max_duration=1sec', '`trainer.max_duration`'),
    'duration in batches': ('trainer.max_duration=3ba', WORKS),
    'tensor parallelism without options': ('trainer.parallelism_config={tp: {}}', 'parallelism_config'),
    'a dataset whose name is a number': ('dataset.name=1.5', '`dataset.name` cannot be used: ModuleNotFoundError: '),
    'dataset that is a module': ('dataset.name=os.path', '`dataset'),
    'report that is a command': ('report.name=os.system', '`report'),
    'an unknown value of on_error': ('dataset.on_error=ignore', '`dataset.on_error'),
    'a negative number of workers': ('loader.num_workers=-1', '`loader.num_workers'),
    'evaluation at no interval': ('trainer.eval_interval=0', WORKS),
    'saving after each tenth of the run': ('trainer.save_interval=0.1dur', WORKS),
    'a save interval of 0': ('trainer.save_interval=0ep', 'save_interval'),
    'a negative number of checkpoints to keep': (
        'trainer.save_num_checkpoints_to_keep=-5',
        'save_num_checkpoints_to_keep',
    ),
    'no time to wait for other ranks': ('trainer.dist_timeout=0', '`trainer.dist_timeout`'),
    'a precision that is a number': ('trainer.precision=3', '`trainer.precision`'),
    'an infinite learning rate': ('optimizer.lr=.inf', '`optimizer.lr`'),
    'longest sample of 0': ('dataset.max_length=0', '`dataset.max_length'),
    'early stopping by the logged name of a metric': (
        'callbacks.early_stopper={monitor: metrics/eval/LanguageCrossEntropy, dataloader_label: eval, patience: 1ep}',
        'LanguageCrossEntropy',
    ),
    'a variable of the environment that is not set': ('optimizer.lr=${oc.env:TOKACC_IS_NOT_SET}', '`optimizer.lr`'),
    'a value that names itself': ('optimizer.lr=${optimizer.lr}', '`optimizer.lr`'),
    'a section that names nothing': ('microbatching=${foo}', '`microbatching`'),
    'a value that names nothing': ('optimizer.lr=${foo.bar}', '`optimizer.lr`'),
    'a callback that is a number': ('callbacks={1: {}}', '`callbacks.1` as a key must be'),
    'a section that is null': ('loader=null', '`loader` must be a mapping'),
    'a section that may be null': ('microbatching.cost=null', WORKS),
    'callbacks in a list': ('callbacks=[speed_monitor]', '`callbacks`'),
    'an unknown value of on_other_data': ('loader.on_other_data=maybe', "'raise' or 'warn', got: 'maybe'"),
    'half a batch': ('trainer.max_duration=1.5ba', '`trainer.max_duration`'),
    'an unknown placeholder in the folder of the report': ('report.folder={nope}/x', '`report.folder`'),
    'an unknown placeholder in the quoted folder of the report': (
        'report.folder="x/{nope}"',
        '`report.folder`',
    ),
    'loggers in a list': ('trainer.loggers=[tensorboard]', '`trainer.loggers`'),
    'a dataset without parts': ('dataset.parts={}', '`dataset.parts`'),
    'a model type that is a number': ('model.config.model_type=3', 'model_type'),
    'heads that do not divide': ('model.config.text_config.num_attention_heads=7', 'attention heads'),
    'an unknown loss unit': ('algorithms.token_accumulation.loss_units={lm: tokenz}', 'loss_units'),
    'a level of logging': ('trainer.python_log_level=info', WORKS),
    'a half-life of 0': ('algorithms.ema={half_life: 0ba}', '`algorithms.ema`'),
    'a beta above 1': ('optimizer.betas=[0.9,1.5]', '`optimizer`'),
    'FSDP as one word': ('trainer.parallelism_config=fsdp', '`trainer.parallelism_config`'),
    'algorithm passes that are words': ('trainer.algorithm_passes=[x]', '`trainer.algorithm_passes`'),
    'an epoch without batches': ('trainer.train_subset_num_batches=0', '`trainer.train_subset_num_batches`'),
    'a schedule scaled to 0': ('trainer.scale_schedule_ratio=0', '`trainer.scale_schedule_ratio`'),
    'a profiler, which is an object': ('trainer.profiler={}', '`trainer.profiler`'),
    'a model that does nothing': ('algorithms.no_op_model={}', '`algorithms` has no class'),
    'three betas': ('optimizer.betas=[0.9,0.95,0.99]', '`optimizer.betas`'),
    'betas that are one number': ('optimizer.betas=0.9', '`optimizer.betas`'),
    'an optimizer of sparse gradients': ('optimizer.name=sparse_adam', '`optimizer` has no class'),
    'an algorithm for images without text': ('algorithms.cut_out={}', '`algorithms` has no class'),
    'an algorithm that mixes images': ('algorithms.mix_up={}', '`algorithms` has no class'),
    'a cosine schedule of length 0': ('scheduler.t_max=0ba', '`scheduler.t_max`'),
    'no warm-up': ('scheduler.t_warmup=0ba', WORKS),
    'a speed monitor with a window of 0': ('callbacks.speed_monitor={window_size: 0}', '`callbacks.speed_monitor'),
    'an unknown argument of a callback': ('callbacks.nan_monitor={patience: 3}', 'patience'),
    'early stopping by the dotted name of the class': (
        'callbacks={composer.callbacks.EarlyStopper: {monitor: loss, dataloader_label: eval}}',
        "('eval', 'loss')",
    ),
    'a threshold on an unknown metric': (
        'callbacks.threshold_stopper={monitor: loss, dataloader_label: eval, threshold: 1}',
        "('eval', 'loss')",
    ),
    '4000 workers': ('loader.num_workers=4000', '`loader.num_workers`'),
    '4000 workers of a dataset': ('dataset.num_workers=4000', '`dataset.num_workers`'),
    'a warm-up without its unit': ('scheduler.t_warmup=10', '`scheduler.t_warmup`'),
    'an optimizer in a list': ('optimizer.name=[adamw]', '`optimizer` has no class'),
    'keys to ignore on loading in one word': (
        'trainer.load_ignore_keys=state/optimizers',
        '`trainer.load_ignore_keys`',
    ),
    'a console log interval of 0': ('trainer.console_log_interval=0ba', '`trainer.console_log_interval`'),
    'a key fsdp2, which Composer ignores': ('trainer.parallelism_config={fsdp2: {}}', 'Did you mean fsdp'),
    'FSDP switched on': ('trainer.parallelism_config={fsdp: true}', '`trainer.parallelism_config.fsdp`'),
    'a language model in a list': ('model.config.text_config.model_type=[llama]', '`model.config`'),
    'a key of two thousand dots': (f'model.config{".a" * 2000}=1', 'must be valid YAML'),
    'an empty path of a checkpoint': ('trainer.load_path=""', '`trainer.load_path`'),
    'a length of the run in words': ('trainer.max_duration=3 epochs', '`trainer.max_duration`'),
    'an override of one element of a list': ('optimizer.betas[0]=0.5', '`optimizer.betas`'),
    'memory with its unit': ('microbatching.device_memory_gib=80GB', '`microbatching.device_memory_gib`'),
    'a tag of Python in a value': ('seed=!!python/object/apply:os.system [id]', '`seed` must be valid YAML'),
    # Names and paths.
    'a checkpoint folder None': ('trainer.save_folder=None', 'save_folder` must be a name'),
    'a run without a name': ('trainer.run_name=""', '`trainer.run_name` must be a name'),
    'a folder with the name of the run, which is null': (
        'trainer={run_name: null, save_folder: "x/{run_name}"}',
        '`trainer.run_name` must be given',
    ),
    'a star, which begins an alias in YAML': ('dataset.path=*.json', 'Quote a text'),
    'braces, which begin a mapping in YAML': ('report.folder={run_name}', "got: {'run_name': None}"),
    'a command as a scheduler': ('scheduler.name=os.system', 'standard library'),
    'a process as a scheduler': ('scheduler={name: subprocess.Popen, args: [ls]}', 'standard library'),
    'a command as a callback': ('callbacks={os.system: {command: "true"}}', 'standard library'),
}
CONFIGS = {name: Override(text, expected) for name, (text, expected) in OVERRIDES.items()}
