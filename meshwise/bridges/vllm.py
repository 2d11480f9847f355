"""vLLM's weight transfer by Meshwise: ``WeightTransferConfig(backend="meshwise")``.

Both engines of vLLM's interface (0.33). Trainers' ranks and vLLM's workers join as two jobs at an
address; each weight goes from the ranks that have it to those that need it, into the live
parameters, once. What arrives is hashed. A version that is not whole is not finished, and by
default the old one stays in place until the new one is verified.
"""

import copy
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import nn

from meshwise import jobs
from meshwise.bridges import layouts, megatron
from meshwise.bridges.loader import Checkpoint, Loaded, holdings_of_loader
from meshwise.bridges.plugin import unknown
from meshwise.bridges.weights import Source, joined
from meshwise.reshard.weights import Refit

try:
    import vllm  # type: ignore[import-not-found]
    from vllm.distributed import parallel_state  # type: ignore[import-not-found]
    from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
        ModuleSource,
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
except ImportError as error:
    raise ImportError(unknown(error)) from None

_JOBS = ("trainer", "server")
SAVE = "MESHWISE_SAVE_LAYOUT"  # a folder, in the server's environment
_GRACE_S = 5.0  # for a call to say why this rank's work failed


@dataclass
class Joining:
    """``address``: host:port on the first trainer's host. ``verify``, ``method``: of ``Refit``.
    ``atomic``: keep the old version in place until the new one is verified; takes its memory a
    second time. ``timeout_s``: how long ranks wait for each other. ``layout``: a folder on the
    workers' hosts, where they saved layouts that are read in place of their loaders."""

    address: str
    verify: str = "hash"
    atomic: bool = True
    method: str = "auto"
    timeout_s: float | None = None
    layout: str = ""

    def join(self, job: str, **sides: Any) -> Refit:
        """Join the other job; return the Refit from this rank's side to all others."""
        ranks = jobs.join_at(self.address, job, _JOBS, timeout_s=self.timeout_s)
        sides |= {"verify": self.verify, "atomic": self.atomic, "method": self.method}
        return joined(ranks, convert=True, **sides)


@dataclass
class InitInfo(Joining, WeightTransferInitInfo):  # type: ignore[misc]
    """The options of ``TrainerInfo``, as workers are told."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: both sides agreed on everything at the start."""


class WorkerEngine(WeightTransferEngine):  # type: ignore[misc]
    """A vLLM worker's side."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    refit: Refit | None = None
    arrived = False  # since the update was started

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainers and plan; no weight moves."""
        self.layout = init_info.layout
        derived = {f"{at}.{own}" for at, of in self._deriving() for own in of._parameters}
        self.refit = init_info.join("server", server=self.model, read=self._read, derived=derived)

    def _deriving(self) -> list[tuple[str, nn.Module]]:
        """Return the layers that derived parameters from others' after loading, as MLA does."""
        from vllm.model_executor.model_loader.utils import (  # type: ignore[import-not-found]
            is_deferred_attention_layer,
        )

        return [
            (at, module)
            for at, module in self.model.named_modules()
            if is_deferred_attention_layer(module) and any(True for _ in module.parameters(False))
        ]

    def _read(self, checkpoint: Checkpoint, rank: int) -> Loaded:
        """Return what vLLM's loader does, of the file if there is one, else of a new model."""
        of_tp, of_pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
        number = of_pp.rank_in_group * of_tp.world_size + of_tp.rank_in_group
        places = [f"{of.rank_in_group} of {of.world_size}" for of in (of_tp, of_pp)]
        model = type(self.model).__name__
        loader = f"vllm {vllm.__version__} {model}, tp {places[0]}, pp {places[1]}"
        if self.layout:
            path = layouts.file_of(self.layout, number)
            layout = layouts.read(path)
            if layout.loader != loader:
                raise ValueError(
                    f"{path} is of {layout.loader!r}, this is {loader!r}; save it anew"
                )
            return layouts.loaded(layout, rank)
        found = holdings_of_loader(self._new(), checkpoint, rank=rank)
        if folder := os.environ.get(SAVE):
            layouts.write(layouts.file_of(folder, number), found, loader=loader)
        return found

    def _new(self) -> nn.Module:
        """Return a model like the served one, without memory. Layers are registered by name in
        their configuration, so it gets one of its own."""
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import (  # type: ignore[import-not-found]
            set_default_torch_dtype,
        )

        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        for name, value in vars(config.compilation_config).items():
            if name.startswith("static_"):
                setattr(config.compilation_config, name, type(value)())
        with torch.device("meta"), set_default_torch_dtype(self.model_config.dtype):
            model: nn.Module = initialize_model(config)
        return model

    @property
    def version(self) -> int | None:
        """The version in place; None before the first one, and while one is not whole."""
        return self.refit.version if self.refit is not None else None

    def start_weight_update(self) -> None:
        self.arrived = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the next version into the live parameters. An error says which version stays."""
        assert self.refit is not None, "init_transfer_engine first"
        try:
            self.refit()
        except (RuntimeError, TimeoutError) as error:
            has = f"version {self.version}" if self.version else "no whole version of a trainer"
            raise type(error)(f"{error}; the server has {has}") from None
        self.arrived = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do as vLLM's own, which waits for an accelerator besides: the refit has waited."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Derive anew what vLLM derives from loaded weights. RuntimeError if the update that was
        started did not arrive whole."""
        if not self.arrived:
            raise RuntimeError("no whole version arrived since start_weight_update; send it again")
        with torch.no_grad():
            for _, module in self._deriving():
                module.process_weights_after_loading(self.model_config.dtype)  # type: ignore[operator]

    def shutdown(self) -> None:
        if self.refit is not None:
            _end(self.refit)
            self.refit = None


@dataclass
class TrainerInfo(Joining, TrainerInitInfo):  # type: ignore[misc]
    """``Joining``, and ``rank`` of this trainer. ``checkpoint``: for Megatron-core's model chunks
    the folder with the config.json that vLLM serves."""

    backend: ClassVar[str] = "meshwise"

    checkpoint: str = ""


class TrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """A trainer rank's side. ``source``: a module of transformers (plain, FSDP2 or tp), or vLLM's
    ``ModuleSource`` of one; with ``TrainerInfo.checkpoint`` Megatron-core's model chunk, or a list
    of them."""

    init_info_cls = TrainerInfo
    refit: Refit

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> Self:
        """Join the workers and plan; no weight moves. Every trainer rank calls this."""
        weights = _source(source, init_info.checkpoint)
        engine = cls(
            client=client, source=source, is_sender=init_info.rank == 0, rank=init_info.rank
        )
        told = {each.name: getattr(init_info, each.name) for each in fields(Joining)}
        engine.refit = engine._beside(
            lambda: client.init_weight_transfer_engine(told),
            lambda: init_info.join("trainer", source=weights),
        )
        return engine

    def send_weights(self) -> None:
        """Move the next version, and drive the client through its round."""
        if self.is_sender:
            self.client.start_weight_update()
        moved = self._beside(lambda: self.client.update_weights({}), self.refit)
        if self.is_sender:
            self.client.finish_weight_update(str(moved.version))

    def shutdown(self) -> None:
        """Leave, with the workers if the client can tell them, as vLLM's over HTTP can."""
        ends = getattr(self.client, "shutdown_weight_transfer_engine", lambda: None)
        self._beside(ends, lambda: _end(self.refit))

    def _beside(self, call: Callable[[], None], work: Callable[[], Any]) -> Any:
        """Do this rank's work while the sender's call to the workers is under way. If both fail,
        the call's error is raised: it names the cause."""
        if not self.is_sender:
            return work()
        failed: list[Exception] = []

        def called() -> None:
            try:
                call()
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=called, daemon=True)
        thread.start()
        try:
            done = work()
        except Exception:
            thread.join(_GRACE_S)
            if failed:
                raise failed[0] from None
            raise
        thread.join()
        if failed:
            raise failed[0]
        return done


def _source(given: Any, checkpoint: str) -> nn.Module | Source:
    """Return a trainer's weights. ValueError if they are none that is known."""
    if checkpoint:
        return megatron.source(given, checkpoint)
    module = given._module if isinstance(given, ModuleSource) else given
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"source is {type(given).__name__}; give the module, or ModuleSource(module), or "
            "Megatron's model chunks with TrainerInfo(checkpoint=) of the served config.json"
        )
    if megatron.is_one(module):
        raise ValueError(
            f"source is Megatron's {type(module).__name__}; name the folder of the served "
            "config.json by TrainerInfo(checkpoint=)"
        )
    return module


def _end(refit: Refit) -> None:
    """Close a Refit and leave its job, unless it was broken off: then nobody meets there."""
    if not refit.ended:
        refit.close()
        refit.ranks.leave()


for engine in (WorkerEngine, TrainerEngine):
    if unlike := sorted(engine.__abstractmethods__):  # of a newer interface
        raise ImportError(unknown(f"{engine.__base__.__name__} wants {', '.join(unlike)}"))
