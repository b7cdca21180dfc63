"""The engine's methods about the model as a whole: its state dict, 16-bit export, memory of gathered parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from deepspeed import comm
from deepspeed.config.offload import OffloadStateTypeEnum as Kind
from deepspeed.errors import CheckpointError, DeepSpeedConfigError, DeepSpeedError, UsageError
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.saving.model_state import collect, gather_experts, join_slices, load, load_by, write_model
from deepspeed.tensor_parallel import cut_state
from deepspeed.zero.parameters.shard import shards_of

__all__ = ["ModelMethods"]


class ModelMethods:
    """Mixed into the engine; all ranks call these together."""

    _parts: Parts

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict; of a model in shards host copies of the whole, on every rank.

        Where one rank is enough, `zero3_consolidated_16bit_state_dict` needs the memory once. With `keep_vars` the
        parameters themselves, which are empty where they are sharded.
        """
        module = self._parts.module
        experts = self._parts.experts
        sliced = experts is not None and bool(experts.slices)
        shared = self._parts.layout["tp"].size > 1 or sliced
        if not keep_vars and (shared or (self._parts.sharded is not None and shards_of(module.parameters()))):
            whole = collect(module, exclude_frozen=exclude_frozen_parameters)
            assert whole is not None, "this rank keeps it"
            if experts is not None:
                join_slices(whole, experts)
            found: dict[str, Any] = OrderedDict() if destination is None else destination
            found.update({prefix + name: value for name, value in whole.items()})
            return found
        into: dict[str, Any] = {} if destination is None else {"destination": destination}
        found = module.state_dict(**into, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    found.pop(prefix + name, None)
        return found

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Collection[nn.Parameter] | None = None,
        allowed_missing_keys: Collection[str] | None = None,
    ) -> None:
        """Load whole values, given directly or under "module"; the masters of the optimizer follow.

        Of a model in shards every rank takes its part of its own `checkpoint`; with `fetch_z3_params` rank 0's values
        are given to all, and other ranks need none. `custom_load_fn(src=, dst=)` replaces the loading itself.
        """
        inner = checkpoint.get("module")
        state = inner if isinstance(inner, Mapping) else checkpoint
        module = self._parts.module
        if self._parts.layout["tp"].size > 1:
            if fetch_z3_params:
                raise UsageError(
                    "load_module_state_dict(fetch_z3_params=True) gives rank 0's values to all, but tensor-parallel "
                    "ranks hold different parts. Give every rank the whole state dict and leave the argument out"
                )
            state = cut_state(module, state, self._parts.layout["tp"].rank)
        experts = self._parts.experts
        if experts is not None and experts.slices:
            if fetch_z3_params:
                raise UsageError(
                    "load_module_state_dict(fetch_z3_params=True) gives rank 0's values to all, but ranks hold "
                    "different experts. Give every rank the whole state dict and leave the argument out"
                )
            state = experts.cut(state)
        if custom_load_fn is not None:
            load_by(module, state, custom_load_fn)
        else:
            load(
                module,
                state,
                strict=strict,
                from_first=fetch_z3_params,
                only=z3_params_to_fetch,
                allowed_missing=allowed_missing_keys or (),
            )
        if self._parts.states is not None:
            self._parts.states.adopt_edits()

    def zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model in its own dtype, in host memory of rank 0; None on other ranks.

        Names are the model's, a tied parameter has all of its names, persistent buffers are included.
        """
        keep = comm.get_rank() == 0
        experts = self._parts.experts
        if experts is None:
            return collect(self._parts.module, keep=keep, exclude_frozen=exclude_frozen_parameters)
        found = collect(self._parts.module, exclude_frozen=exclude_frozen_parameters)
        assert found is not None, "every rank keeps its experts"
        gather_experts(found, experts, keep=keep)
        return found if keep else None

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self.zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self.zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Rank 0 writes the whole model in its own dtype; a name that ends in .safetensors gives that format.

        With `max_shard_size`, such as "5GB", it is several files with an index as Transformers reads them. At stage 3
        it is an error where the config says `stage3_gather_16bit_weights_on_model_save` false.
        """
        zero = self._parts.config.schema.zero_optimization
        given = "gather_16bit_weights_on_model_save" in zero.model_fields_set
        if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save and given:
            raise DeepSpeedConfigError(
                "save_16bit_model() gathers the whole model on rank 0, which the config forbids by "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save false. Remove the key or set it to true, "
                "or call save_checkpoint(), whose files zero_to_fp32.py joins",
                path="zero_optimization.stage3_gather_16bit_weights_on_model_save",
            )
        state = self.zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        trouble: list[Any] = [None]
        if state is not None:
            try:
                write_model(state, Path(save_dir), save_filename, max_shard_size)
            except (DeepSpeedError, OSError) as error:
                trouble = [str(error)]
        comm.broadcast_object_list(trouble, src=0)
        if trouble[0] is not None:
            raise CheckpointError(f"save_16bit_model failed on rank 0: {trouble[0]}")
        return True

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def empty_partition_cache(self) -> None:
        """Free whole parameters that are not in use at the moment, on all ranks together.

        Those that stay whole between uses (`stage3_param_persistence_threshold`), too: they return before the next use.
        """
        sharded = self._parts.sharded
        if sharded is not None and sharded.hooks is not None and Kind.lp_params not in self._parts.moved:
            sharded.hooks.let_go()
