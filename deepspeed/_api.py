"""The functions a training script calls: they sort out arguments and hand over.

What takes long to import is imported inside of them, concurrently with what `initialize` begins before.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from deepspeed.errors import UsageError
from deepspeed.log import logger
from deepspeed.ops.precompile import load_ahead
from deepspeed.runtime.destroyed import without_destroyed_engine

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema
    from deepspeed.runtime.engine import DeepSpeedEngine

DeepSpeedOptimizerCallable = Callable[..., Optimizer]
"""What `initialize` takes as `optimizer` to make one of parameters."""
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]
"""What `initialize` takes as `lr_scheduler` to make one of the optimizer."""

_MESH = ("data_parallel", "sequence_parallel")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make a training engine of a model: (engine, optimizer, training_dataloader, lr_scheduler).

    The config comes from `config` (a dict, a path, base64 text), `config_params`, or `args.deepspeed_config`. An
    `optimizer` (or a callable that makes one from parameters) takes precedence over the config's, and so does an
    `lr_scheduler` (or a callable that makes one from the optimizer).
    """
    if model is None:
        raise UsageError("deepspeed.initialize needs a model: pass model=...")
    model = without_destroyed_engine(model)
    source = _config_source(args, config, config_params)
    with load_ahead(model, source):  # concurrently with the imports that follow
        from deepspeed import comm
        from deepspeed._assemble import Request, assemble
        from deepspeed.config import DeepSpeedConfig, load
        from deepspeed.config.read import read
        from deepspeed.pipe.axes import model_kind
        from deepspeed.tensor_parallel.model_init import with_asked

        raw = with_asked(model, read(source))
        _check_local_rank(args)
        comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
        loaded = load(raw)
        mpu = model_kind(model).mpu(mpu, mesh_param, loaded.schema.axis_sizes)
        mesh = _mesh(mesh_param, mpu)
        config = DeepSpeedConfig(loaded, mpu=mpu, mesh_device=mesh)
        config.warn()
        request = Request(
            config=config,
            module=model,
            optimizer=optimizer,
            model_parameters=None if model_parameters is None else list(model_parameters),
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            mesh=mesh if mesh is not None or mpu is not None else _mesh_of(config.schema),
            collate_fn=collate_fn,
        )
        engine = assemble(request)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` (and their former names) to a script's own arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", action="store_true", help="say that this run uses DeepSpeed; for the script's own use"
    )
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the DeepSpeed JSON config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    """The one place the config comes from; two places are an error."""
    given = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    old = getattr(args, "deepscale_config", None)
    if old is not None:
        if from_args is not None:
            raise UsageError("--deepscale_config is the old name of --deepspeed_config, and both are given; keep one")
        logger.warning("--deepscale_config is the old name of --deepspeed_config; please use that")
        from_args = old
    if given is not None and from_args is not None:
        raise UsageError(
            "the config is given twice: as an argument of deepspeed.initialize and as args.deepspeed_config "
            f"({from_args!r}); remove one of them"
        )
    source = given if given is not None else from_args
    if source is None:
        raise UsageError(
            "deepspeed.initialize needs a config: pass config=... (a dict or a path), or start the script with "
            "--deepspeed_config FILE and pass args"
        )
    return source


def _check_local_rank(args: Any) -> None:
    given, found = getattr(args, "local_rank", None), os.environ.get("LOCAL_RANK")
    if isinstance(given, int) and given >= 0 and found is not None and str(given) != found:
        raise UsageError(
            f"args.local_rank is {given}, but the environment says LOCAL_RANK={found}; the launcher sets both, so one "
            "of them was changed by the script"
        )


def _mesh(mesh_param: Any, mpu: Any) -> Any:
    """The device mesh that was given: itself, or its two sizes."""
    from deepspeed import comm

    if mesh_param is not None and mpu is not None:
        raise UsageError("mesh_param and mpu both describe the layout; pass one of them")
    if isinstance(mesh_param, (tuple, list)):
        return comm.initialize_mesh_device(tuple(mesh_param), _MESH)
    return mesh_param


def _mesh_of(schema: Schema) -> Any:
    """The device mesh that two keys of the config describe; None where ranks share layers, too."""
    from deepspeed import comm

    data, sequence = schema.data_parallel_size, schema.sequence_parallel_size
    if data is None or sequence is None or schema.axis_sizes["tp"] > 1:
        return None
    return comm.initialize_mesh_device((data, sequence), _MESH)
