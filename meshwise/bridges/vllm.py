"""vLLM's weight transfer by Meshwise: ``WeightTransferConfig(backend="meshwise")``.

Both engines of vLLM's interface (0.33). Trainers' ranks and vLLM's workers join as two jobs at an
address; each weight goes from the ranks that have it to those that need it, into the live
parameters, once. What arrives is hashed. A version that is not whole is not finished, and by
default the old one stays in place until the new one is verified.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from meshwise import jobs
from meshwise.bridges.weights import joined
from meshwise.reshard.weights import Refit

_JOBS = ("trainer", "server")
_GRACE_S = 5.0  # for a call to say why this rank's work failed


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The address where workers meet the trainers, and the options of ``TrainerInfo``."""

    address: str
    verify: str = "hash"
    atomic: bool = True
    method: str = "auto"
    timeout_s: float | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: both sides agreed on everything at the start."""


class WorkerEngine(WeightTransferEngine):  # type: ignore[misc]
    """A vLLM worker's side."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    refit: Refit | None = None
    version: int | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainers and plan; no weight moves."""
        ranks = jobs.join_at(init_info.address, "server", _JOBS, timeout_s=init_info.timeout_s)
        options = _options(init_info)
        self.refit = joined(ranks, server=self.model, new=self._new, convert=True, **options)

    def _new(self) -> nn.Module:
        """Return a model like the served one, without memory. Layers are registered by name in
        their configuration, so it gets one of its own."""
        from vllm.model_executor.model_loader.utils import (  # type: ignore[import-not-found]
            initialize_model,
        )
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

    def start_weight_update(self) -> None:
        self.version = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the next version into the live parameters."""
        assert self.refit is not None, "init_transfer_engine first"
        self.version = self.refit().version

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do as vLLM's own, which waits for an accelerator besides: the refit has waited."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """RuntimeError if the update that was started did not arrive whole."""
        if self.version is None:
            raise RuntimeError("no whole version arrived since start_weight_update; send it again")

    def shutdown(self) -> None:
        if self.refit is not None:
            self.refit.close()
            self.refit.ranks.leave()
            self.refit = None


@dataclass
class TrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """``address``: host:port on the first trainer's host. ``verify``, ``method``: of ``Refit``.
    ``atomic``: keep the old version in place until the new one is verified; takes its memory a
    second time. ``timeout_s``: how long ranks wait for each other."""

    backend: ClassVar[str] = "meshwise"

    address: str
    verify: str = "hash"
    atomic: bool = True
    method: str = "auto"
    timeout_s: float | None = None


class TrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """A trainer rank's side. ``source``: a module of transformers (plain, FSDP2 or tp), or vLLM's
    ``ModuleSource`` of one."""

    init_info_cls = TrainerInfo
    refit: Refit

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> Self:
        """Join the workers and plan; no weight moves. Every trainer rank calls this."""
        module = source._module if isinstance(source, ModuleSource) else source
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"source is {type(source).__name__}; give the module, or ModuleSource(module)"
            )
        engine = cls(
            client=client, source=source, is_sender=init_info.rank == 0, rank=init_info.rank
        )
        options = _options(init_info)
        told = {"address": init_info.address, "timeout_s": init_info.timeout_s, **options}

        def join() -> Refit:
            ranks = jobs.join_at(init_info.address, "trainer", _JOBS, timeout_s=init_info.timeout_s)
            return joined(ranks, source=module, convert=True, **options)

        engine.refit = engine._beside(lambda: client.init_weight_transfer_engine(told), join)
        return engine

    def send_weights(self) -> None:
        """Move the next version, and drive the client through its round."""
        if self.is_sender:
            self.client.start_weight_update()
        moved = self._beside(lambda: self.client.update_weights({}), self.refit)
        if self.is_sender:
            self.client.finish_weight_update(str(moved.version))

    def shutdown(self) -> None:
        self.refit.close()
        self.refit.ranks.leave()

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


def _options(info: InitInfo | TrainerInfo) -> dict[str, Any]:
    return {"verify": info.verify, "atomic": info.atomic, "method": info.method}
