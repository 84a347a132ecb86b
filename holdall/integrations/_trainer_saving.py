"""Saving and resuming of a `transformers.Trainer` whose model is in shards over processes.

The trainer saves from one process, which cannot gather weights alone. So its methods that all processes pass are wrapped, by
attributes of the trainer, which stay as long as the model is in shards:

    OUT/checkpoint-300/
      config.json, model*.safetensors   whole weights: `from_pretrained` loads them in any process
      holdall/                          optimizer and schedule (`checkpoints/trainers.py`); `optimizer.pt` says so
      rng_state_0.pth, ...              random numbers of each process, by the trainer
      trainer_state.json                written last; without it there is no checkpoint

"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdall.checkpoints.folders import remove, to_disk
from holdall.checkpoints.states import own_names
from holdall.checkpoints.trainers import BESIDE, load_states, read_whole_states, read_whole_weights, save_states, whole_weights
from holdall.errors import Unsupported
from holdall.sharded import is_in_shards

_LAST = "trainer_state.json"
_ELSEWHERE = ("optimizer.pt", "scheduler.pt")
_NOTE = (
    f"The states are in the folder `{BESIDE}`: resume with holdall.integrations.HoldallCallback, on any number of processes.\n"
)
_ON_RANKS = ("train", "_save_checkpoint", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_load_best_model")
_ALWAYS = ("_load_optimizer_and_scheduler",)

log = logging.getLogger("holdall")


class TrainerSaving:
    """Wraps a trainer's methods, in one process only the one that loads states."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._over_ranks = trainer.args.world_size > 1
        self._waiting: Callable[[], object] | None = None  # loads states, once the model is in shards
        self._is_saving = False
        names = (*_ON_RANKS, *_ALWAYS) if self._over_ranks else _ALWAYS
        lost = [name for name in names if not hasattr(trainer, name)]
        if lost:
            what = f"this version of transformers has no `Trainer.{lost[0]}`, by which the model is saved"
            raise Unsupported(what, hint="train in one process, or use holdall.fit in a loop of your own")
        self._plain: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in names}
        for name in names:
            setattr(trainer, name, getattr(self, name.lstrip("_")))

    def load_waiting_states(self) -> None:
        """Load optimizer and schedule of the checkpoint that the trainer resumes from, once the model is in shards."""
        load, self._waiting = self._waiting, None
        if load is not None:
            load()

    def keep_alone(self, model: Any) -> Callable[[], object]:
        """Refuse `model.save_pretrained` outside of the trainer's own saving; returns the function that ends it."""
        plain = getattr(model, "save_pretrained", None)
        if plain is None:
            return lambda: None
        names = own_names(model)  # in which the trainer looks for weights when it resumes

        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            if not self._is_saving:
                what = "the model is in shards over processes, which one of them cannot gather"
                raise Unsupported(what, hint="call `trainer.save_model(folder)` on all processes")
            return plain(*args, **(names | kwargs))

        model.save_pretrained = save_pretrained
        return lambda: model.__dict__.pop("save_pretrained", None)

    # in the place of the trainer's

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        from holdall.parallel.agree import from_first

        trainer = self._trainer
        if trainer.model_init is None and is_in_shards(trainer.model):
            what = "the model is in shards from the training before"
            raise Unsupported(what, hint="build the model and the trainer again, then resume_from_checkpoint=True")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = from_first(lambda: _last_complete(Path(trainer.args.output_dir))) or True
        return self._plain["train"](resume_from_checkpoint, *args, **kwargs)

    def save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        if self._trainer.args.should_save:  # what is written over is no checkpoint from now on
            folder = Path(self._trainer._get_output_dir(trial=trial), f"checkpoint-{self._trainer.state.global_step}")
            (folder / _LAST).unlink(missing_ok=True)
            remove(folder / BESIDE)
        self._plain["_save_checkpoint"](model, trial, *args, **kwargs)

    def save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        from holdall.parallel.agree import together

        trainer = self._trainer
        if state_dict is None and is_in_shards(trainer.model):
            state_dict = whole_weights(trainer.model, keep=trainer.args.should_save)
        self._is_saving = True
        try:
            together(lambda: self._plain["_save"](output_dir, state_dict))
        finally:
            self._is_saving = False

    def save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        trainer, folder = self._trainer, Path(output_dir)
        save_states(
            folder / BESIDE, trainer.model, self._optimizer, step=trainer.state.global_step, scheduler=trainer.lr_scheduler
        )
        if trainer.args.should_save:
            for name in _ELSEWHERE:  # a trainer without holdall stops there; without the files it would begin with new states
                (folder / name).write_text(_NOTE)

    def save_rng_state(self, output_dir: Any) -> None:
        from holdall.parallel.agree import together

        together(lambda: self._plain["_save_rng_state"](output_dir))
        if self._trainer.args.should_save:
            for file in (path for path in Path(output_dir).iterdir() if path.is_file()):
                to_disk(file)

    def load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        load: Callable[[], object] = partial(self._plain["_load_optimizer_and_scheduler"], checkpoint)
        is_plain = checkpoint is None or not Path(checkpoint, BESIDE).is_dir()
        if not is_plain:
            load = partial(self._load, Path(checkpoint, BESIDE))
        elif self._over_ranks and checkpoint is not None and all(Path(checkpoint, name).is_file() for name in _ELSEWHERE):
            load = partial(self._load_plain, Path(checkpoint))
        self._waiting = load if self._over_ranks else None
        if not self._over_ranks:
            load()

    def load_best_model(self) -> None:
        trainer = self._trainer
        if is_in_shards(trainer.model):
            read_whole_weights(Path(trainer.state.best_model_checkpoint), trainer.model)
        else:
            self._plain["_load_best_model"]()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        found = self._trainer.optimizer
        return getattr(found, "optimizer", found)  # type: ignore[no-any-return]  # accelerate's wrapper

    def _load_plain(self, folder: Path) -> None:
        """What a trainer has saved of a model that was not in shards."""
        states, schedule = (torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True) for name in _ELSEWHERE)
        read_whole_states(self._optimizer, states)
        self._trainer.lr_scheduler.load_state_dict(schedule)

    def _load(self, folder: Path) -> None:
        load_states(folder, self._trainer.model, self._optimizer, scheduler=self._trainer.lr_scheduler)


def _last_complete(out: Path) -> str | None:
    """The last checkpoint of a run that was written to its end."""
    found = {int(path.name.rpartition("-")[2]): path for path in out.glob("checkpoint-*") if path.name[11:].isdecimal()}
    for _, path in sorted(found.items(), reverse=True):
        with suppress(OSError, ValueError):
            json.loads((path / _LAST).read_text(encoding="utf-8"))
            return str(path)
        log.warning("holdall: `%s` is not complete and was ignored", path)
    return None
